//! Random faults at exact operations, over a long run. `make chaos`; `SEED` chooses which.

use crate::crew::{Crew, job};
use crate::fault::{Fault, How};
use reknit_control_sim::Random;
use reknit_layout::Place;

const STEPS: u64 = 500;
const FAULTS: u64 = 10;
/// Each fault has a stretch of the run for itself: it strikes and heals within it.
const STRETCH: u64 = STEPS / FAULTS;
const DATA: u32 = 2;
const TENSOR: u32 = 4;

#[derive(Debug, Clone, Copy)]
enum Point {
    /// The rank dies before this exchange of its group in the forward or the backward pass.
    Pass(u64),
    /// Before its gradients leave for the sum over replicas.
    Sum,
    /// A speaker, before the vote.
    Vote,
    /// A speaker, with the vote's answer in its hands: the rest of its group rolls forward.
    Answer,
    /// The rank lives, but the vote's answer does not reach it: it rolls forward alone.
    LostAnswer,
}

#[derive(Debug, Clone, Copy)]
struct Strike {
    point: Point,
    place: Place,
    /// The step that it breaks.
    step: u64,
    /// After this one the place is filled again.
    back: u64,
}

impl Strike {
    fn random(random: &mut Random, number: u64) -> Self {
        let step = STRETCH * number + 5 + random.below(STRETCH / 2);
        let back = step + 1 + random.below(STRETCH / 3);
        let point = match random.below(5) {
            0 => Point::Pass(random.below(12)),
            1 => Point::Sum,
            2 => Point::Vote,
            3 => Point::Answer,
            _ => Point::LostAnswer,
        };
        let slot = match point {
            Point::Pass(_) | Point::Sum => random.below(TENSOR.into()),
            Point::Vote | Point::Answer => 0,
            Point::LostAnswer => 1 + random.below(u64::from(TENSOR) - 1),
        };
        let place = Place::new(random.below(DATA.into()) as u32, 0, slot as u32);
        Self { point, place, step, back }
    }

    fn fault(&self) -> Fault {
        // A group passes something on twice in a step: the replicated gradients, then what the vote decided.
        let passes_on = |op: &str| op == "Broadcast";
        match self.point {
            Point::Pass(at) => Fault { group: "tensor", op: |_| true, at, how: How::Die },
            Point::Sum => Fault { group: "column", op: |_| true, at: 0, how: How::Die },
            Point::Vote => Fault { group: "speakers", op: |_| true, at: 0, how: How::Die },
            Point::Answer => Fault { group: "tensor", op: passes_on, at: 1, how: How::Die },
            Point::LostAnswer => Fault { group: "tensor", op: passes_on, at: 1, how: How::LoseAnswer },
        }
    }

    /// The newest step that somebody commits before the others notice.
    fn leaves(&self) -> u64 {
        match self.point {
            Point::Pass(_) | Point::Sum | Point::Vote => self.step - 1,
            Point::Answer | Point::LostAnswer => self.step,
        }
    }

    /// Strikes, checks that it did, and has the job go on whole again.
    fn on(self, crew: &mut Crew<f32>) {
        assert!(crew.train_to(self.step - 1));
        let rolled = crew.rolled_forward;
        crew.arm(self.place, self.fault());
        assert!(!crew.train_to(self.back), "{self:?} did not stop the epoch");
        assert_eq!(crew.committed.0, self.leaves(), "{self:?}");
        let gone = match self.point {
            Point::LostAnswer => {
                assert!(crew.disarm(self.place), "{self:?} did not happen");
                0
            }
            Point::Pass(_) | Point::Sum | Point::Vote | Point::Answer => {
                // It looks whether the fault has fired.
                crew.bury(self.place);
                1
            }
        };
        crew.reform(false).unwrap();
        let forward = match self.point {
            Point::Pass(_) | Point::Sum | Point::Vote => 0,
            Point::Answer => TENSOR as usize - 1,
            Point::LostAnswer => 1,
        };
        assert_eq!(crew.rolled_forward - rolled, forward, "{self:?}");
        assert_eq!(crew.degrees.last().unwrap().iter().sum::<u32>(), DATA * TENSOR - gone);
        crew.digest();
        assert!(crew.train_to(self.back));
        if gone > 0 {
            crew.hire(self.place);
            crew.reform(false).unwrap();
        }
    }
}

fn run(strikes: &[Strike]) -> Crew<f32> {
    let dir = tempfile::tempdir().unwrap();
    let mut crew = Crew::<f32>::start(job(dir.path(), "f32", DATA, TENSOR, STEPS));
    strikes.iter().for_each(|strike| strike.on(&mut crew));
    assert!(crew.train_to(STEPS));
    crew.check_samples();
    assert_eq!(crew.degrees.last().unwrap(), &[TENSOR, TENSOR]);
    crew
}

#[test]
#[ignore = "half a minute: make chaos"]
fn five_hundred_steps_with_ten_random_faults_learn_the_same_and_repeat_bit_by_bit() {
    let seed = std::env::var("SEED").map_or(1, |text| text.parse().expect("SEED is a number"));
    let mut random = Random(seed);
    let strikes: Vec<_> = (0..FAULTS).map(|number| Strike::random(&mut random, number)).collect();
    println!("seed {seed}:");
    for Strike { point, place, step, back } in &strikes {
        println!("  step {step}: {point:?} at {place}, whole again after step {back}");
    }
    let [first, second, clean] = [&strikes[..], &strikes[..], &[]].map(run);

    let bits = |crew: &Crew<f32>| crew.losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&first), bits(&second), "the same faults at the same points give the same bits");
    assert_eq!(first.digest(), second.digest());
    let apart = first.losses.iter().zip(&clean.losses).map(|(a, b)| (a - b).abs() / b.abs());
    let worst = apart.fold(0.0, f64::max);
    println!(
        "{STEPS} steps, {FAULTS} faults: losses and weights repeat bit by bit; largest difference of a loss from the run without faults: {worst:.1e}"
    );
    assert!(worst <= 1e-4, "{worst:e}");
}
