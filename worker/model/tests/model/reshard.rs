//! State that moves keeps its bits, and nothing is guessed.

use crate::support::{Owned, State, batch, everything, model, scattered, split, together};
use reknit_layout::job::{ModelSpec, OptimizerSpec};
use reknit_layout::{Axis, Family, Step, Units};
use reknit_model::{ArrivalError, Shard, ShardError};

const OPTIMIZER: OptimizerSpec = OptimizerSpec {
    lr: 1e-2,
    warmup_steps: 2,
    decay_steps: 50,
    min_lr: 1e-3,
    betas: [0.9, 0.95],
    eps: 1e-8,
    weight_decay: 0.1,
    grad_clip: 1.0,
};

fn train(shards: &mut [Shard<f32>], steps: std::ops::RangeInclusive<u64>) {
    for step in steps {
        let batch = batch(&model(), 2, step);
        for shard in shards.iter_mut() {
            shard.zero_gradients();
        }
        together(shards, |shard, rank| shard.forward_backward(&batch, 0.1, rank).expect("whole group"));
        let norm =
            shards.iter().enumerate().map(|(rank, shard)| shard.gradient_norm_squared(rank == 0)).sum();
        for shard in shards.iter_mut() {
            shard.apply(Step(step), &OPTIMIZER, norm);
        }
    }
}

fn start(owned: &[Owned]) -> Vec<Shard<f32>> {
    owned.iter().map(|owned| Shard::init(&model(), 3, owned)).collect()
}

fn state(shards: &[Shard<f32>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for shard in shards {
        for (&axis, units) in shard.owned() {
            shard.export_units(axis, units, &mut bytes).expect("owned");
        }
        shard.export_replicated(&mut bytes);
    }
    bytes
}

/// To each rank what it lacks, in parts of `part` bytes; ranks beyond the old ones start with nothing.
fn move_to(old: Vec<Shard<f32>>, owned: &[Owned], part: usize) -> Vec<Shard<f32>> {
    let source: Shard<f32> = State::of(&old).build(&model(), &everything(&model()));
    let mut shards = old.into_iter().map(Some).chain(std::iter::repeat_with(|| None));
    owned.iter().map(|owned| move_one(shards.next().flatten(), owned, &source, part)).collect()
}

fn move_one(held: Option<Shard<f32>>, owned: &Owned, source: &Shard<f32>, part: usize) -> Shard<f32> {
    let newcomer = held.is_none();
    let mut shard = match held {
        Some(mut held) => {
            held.make_room(owned).expect("known units");
            held
        }
        None => Shard::awaiting(&model(), owned).expect("known units"),
    };
    let before = shard.owned().clone();
    let mut fetch = |axis, units: &Units, length: usize| {
        for at in (0..length).step_by(part) {
            let (mut at, end) = (at, length.min(at + part));
            while at < end {
                let bytes = source.part(axis, units, at).expect("owned");
                let room = shard.room(axis, units, at).expect("there is room");
                let len = bytes.len().min(room.len()).min(end - at);
                room[..len].copy_from_slice(&bytes[..len]);
                at += len;
            }
        }
        shard.arrived(axis, units);
    };
    for (&axis, units) in owned {
        let missing = units.difference(before.get(&axis).unwrap_or(&Units::default()));
        let unit_len = Shard::<f32>::unit_len(&model(), axis.family);
        fetch(Some(axis), &missing, missing.len() as usize * unit_len * 12);
    }
    if newcomer {
        fetch(None, &Units::default(), model().replicated_params() as usize * 12);
    }
    assert_eq!(shard.check_arrived(), Ok(()));
    assert_eq!(shard.replicated_digest(), source.replicated_digest());
    shard.adopt();
    shard
}

#[test]
fn shards_that_change_in_place_are_those_made_anew() {
    let layouts = [split(&model(), 4), scattered(&model(), 3), split(&model(), 2), scattered(&model(), 4)];
    for part in [3, 20, 1 << 10, 1 << 20] {
        let mut shards = start(&layouts[0]);
        train(&mut shards, 1..=2);
        for (round, owned) in layouts.iter().cycle().skip(1).take(6).enumerate() {
            let whole = State::of(&shards);
            let anew: Vec<Shard<f32>> = owned.iter().map(|owned| whole.build(&model(), owned)).collect();
            shards = move_to(shards, owned, part);
            assert_eq!(state(&shards), state(&anew), "parts of {part} bytes, round {round}");
            let steps = 2 * round as u64 + 3;
            train(&mut shards, steps..=steps + 1);
        }
    }
}

#[test]
fn what_was_not_asked_for_is_refused_and_what_is_missing_named() {
    let owned = &split(&model(), 2)[0];
    let other = &split(&model(), 2)[1];
    let source = Shard::<f32>::init(&model(), 3, other);
    let axis = Axis::ffn(0);
    let mut shard = Shard::<f32>::awaiting(&model(), owned).expect("known units");
    let mut bytes = Vec::new();
    source.export_units(axis, &other[&axis], &mut bytes).expect("owned");
    let refused = shard.receive(Some(axis), &other[&axis], &bytes);
    assert_eq!(refused, Err(ArrivalError::Unexpected { axis: Some(axis), units: other[&axis].clone() }));
    let missing = shard.check_arrived();
    assert_eq!(missing, Err(ArrivalError::Missing { axis: Axis::attn(0), unit: 0 }));
    let text = "unit 0 of attn/0 is neither held nor received";
    assert_eq!(missing.map_err(|error| error.to_string()), Err(text.to_owned()));

    let none = Shard::<f32>::awaiting(&model(), &Owned::new()).expect("nothing");
    assert_eq!(none.check_arrived(), Err(ArrivalError::MissingReplicated));
    assert_eq!(none.part(None, &Units::default(), 0), Err(ShardError::NotCome));
    let beyond = Owned::from([(Axis::attn(2), Units::range(0, 1))]);
    let unknown = ArrivalError::Unknown { axis: Axis::attn(2), units: Units::range(0, 1) };
    assert_eq!(Shard::<f32>::awaiting(&model(), &beyond).err(), Some(unknown));
}

#[test]
fn a_block_of_another_length_is_refused() {
    let owned = Owned::from([(Axis::ffn(0), Units::range(2, 4))]);
    let mut shard = Shard::<f32>::awaiting(&model(), &owned).expect("known units");
    let expected = 2 * 3 * 3 * 16 * 4 * 3;
    for len in [0, 5, expected - 4, expected + 4] {
        let result = shard.receive(Some(Axis::ffn(0)), &Units::range(2, 4), &vec![0; len]);
        assert!(matches!(result, Err(ArrivalError::Length { .. })), "{len}: {result:?}");
    }
    let replicated = shard.receive(None, &Units::default(), &[0; 4]);
    assert!(matches!(replicated, Err(ArrivalError::Length { expected: 960, .. })), "{replicated:?}");
    assert!(shard.room(Some(Axis::ffn(0)), &Units::range(2, 4), expected).expect("its end").is_empty());
}

#[test]
fn until_the_commit_nothing_that_is_held_changes() {
    let (four, three) = (split(&model(), 4), scattered(&model(), 3));
    let mut shards = start(&four);
    train(&mut shards, 1..=2);
    let never_moved: Vec<Shard<f32>> =
        four.iter().map(|owned| State::of(&shards).build(&model(), owned)).collect();
    let before = state(&shards);
    let whole: Shard<f32> = State::of(&shards).build(&model(), &everything(&model()));
    let axis = Axis::ffn(1);
    for (shard, owned) in shards.iter_mut().zip(&three) {
        shard.make_room(owned).expect("known units");
        let missing = owned[&axis].difference(&shard.owned()[&axis]);
        let mut bytes = Vec::new();
        whole.export_units(axis, &missing, &mut bytes).expect("owned");
        // The last value does not come.
        let short = shard.receive(Some(axis), &missing, &bytes[..bytes.len() - 4]);
        assert!(matches!(short, Err(ArrivalError::Length { .. })), "{short:?}");
        assert!(matches!(shard.check_arrived(), Err(ArrivalError::Missing { .. })));
    }
    assert!(state(&shards) == before, "while it arrives");
    shards.iter_mut().for_each(Shard::give_up_room);
    assert!(state(&shards) == before, "after it was given up");
    let mut never_moved = never_moved;
    train(&mut shards, 3..=4);
    train(&mut never_moved, 3..=4);
    assert!(state(&shards) == state(&never_moved), "training goes on differently");
}

#[test]
fn four_ranks_to_three_and_back_keeps_every_bit() {
    let (four, three) = (split(&model(), 4), scattered(&model(), 3));
    let mut never_moved = start(&four);
    train(&mut never_moved, 1..=3);
    let mut moved = start(&four);
    train(&mut moved, 1..=3);
    let before = state(&moved);
    let on_three = move_to(moved, &three, 1 << 10);
    let mut back = move_to(on_three, &four, 1 << 10);
    assert!(state(&back) == before, "a bit has changed");
    for (a, b) in back.iter().zip(&never_moved) {
        assert_eq!(a.replicated_digest(), b.replicated_digest());
    }
    train(&mut back, 4..=5);
    train(&mut never_moved, 4..=5);
    assert!(state(&back) == state(&never_moved), "training goes on differently");
}

#[test]
fn digests_see_weights_and_moments() {
    let owned = everything(&model());
    let mut shards = start(&[owned]);
    let digests = |shard: &Shard<f32>| (shard.digest(Axis::attn(1), 5).unwrap(), shard.replicated_digest());
    let first = digests(&shards[0]);
    train(&mut shards, 1..=1);
    let second = digests(&shards[0]);
    assert!(first.0 != second.0 && first.1 != second.1);
    // A moment alone: step 1 with a rate of 0 changes no weight.
    let still = OptimizerSpec { lr: 0.0, ..OPTIMIZER };
    shards[0].apply(Step(1), &still, 1.0);
    let third = digests(&shards[0]);
    assert!(third.0 != second.0 && third.1 != second.1);
    assert_eq!(third.1.len(), 16);
}

#[test]
fn unit_lengths_are_those_of_the_planner() {
    for tie_embeddings in [false, true] {
        let model = ModelSpec { tie_embeddings, ..model() };
        for family in [Family::Attn, Family::Ffn, Family::Vocab] {
            assert_eq!(Shard::<f32>::unit_len(&model, family) as u64, model.unit_params(family));
        }
        let shard = Shard::<f32>::init(&model, 0, &Owned::new());
        assert_eq!(shard.replicated_gradients().len() as u64, model.replicated_params());
    }
}

#[test]
fn units_of_others_are_refused() {
    let half = &split(&model(), 2)[0];
    let mut shard = Shard::<f32>::init(&model(), 3, half);
    let axis = Axis::attn(0);
    let refused = ShardError::NotOwned { axis, unit: 3, owned: Units::range(0, 3) };
    let mut bytes = vec![1];
    assert_eq!(shard.export_units(axis, &Units::range(2, 5), &mut bytes), Err(refused.clone()));
    assert_eq!(shard.digest(axis, 3), Err(refused));
    assert_eq!(bytes, [1]);
    let error = shard.put_gradients(axis, vec![0.0; 3]);
    assert!(matches!(error, Err(ShardError::Length { got: 3, expected: 1152, .. })), "{error:?}");
    let error = shard.put_replicated_gradients(vec![0.0]);
    assert_eq!(error, Err(ShardError::ReplicatedLength { got: 1, expected: 80 }));
}
