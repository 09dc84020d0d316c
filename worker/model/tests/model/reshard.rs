//! State that moves keeps its bits, and nothing is guessed.

use crate::support::{Owned, batch, everything, everything_from, model, scattered, split, together};
use reknit_layout::job::{ModelSpec, OptimizerSpec};
use reknit_layout::{Axis, Family, Step, Units};
use reknit_model::{Intake, RebuildError, Received, Shard, ShardError};

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

/// To each rank what it lacks, from whoever has it; ranks beyond the old ones start with nothing.
fn move_to(old: &[Shard<f32>], owned: &[Owned]) -> Vec<Shard<f32>> {
    let rebuild = |(rank, owned): (usize, &Owned)| {
        let mut received = Received::new();
        for (&axis, units) in owned {
            let held = old.get(rank).and_then(|shard| shard.owned().get(&axis)).cloned().unwrap_or_default();
            for source in old {
                let units = units.difference(&held).intersection(&source.owned()[&axis]);
                if units.is_empty() {
                    continue;
                }
                let mut bytes = Vec::new();
                source.export_units(axis, &units, &mut bytes).expect("owned");
                let unit_len = Shard::<f32>::unit_len(&model(), axis.family);
                assert_eq!(bytes.len(), units.len() as usize * unit_len * 3 * 4);
                received.add_units(axis, units, bytes);
            }
        }
        if old.get(rank).is_none() {
            let mut bytes = Vec::new();
            old[0].export_replicated(&mut bytes);
            received.set_replicated(bytes);
        }
        Shard::rebuild(&model(), owned, old.get(rank), &received).expect("complete")
    };
    owned.iter().enumerate().map(rebuild).collect()
}

/// As [`move_to`], in parts of `part` bytes and in place.
fn adopt(old: Vec<Shard<f32>>, owned: &[Owned], part: usize) -> Vec<Shard<f32>> {
    let intakes = owned.iter().enumerate().map(|(rank, owned)| {
        let held = old.get(rank);
        let lacks = held.map_or_else(|| owned.clone(), |held| held.lacks(owned));
        let mut intake = Intake::new(&model(), &lacks, held.is_none()).expect("known units");
        let mut fetch = |source: &Shard<f32>, axis, units: &Units, length: usize| {
            for at in (0..length).step_by(part) {
                let mut bytes = vec![0; part.min(length - at)];
                source.export_part(axis, units, at, &mut bytes).expect("owned");
                intake.import_part(axis, units, at, &bytes).expect("lacking");
            }
        };
        for (&axis, lacks) in &lacks {
            for source in &old {
                let units = lacks.intersection(&source.owned()[&axis]);
                let unit_len = Shard::<f32>::unit_len(&model(), axis.family);
                fetch(source, Some(axis), &units, units.len() as usize * unit_len * 12);
            }
        }
        if held.is_none() {
            fetch(&old[0], None, &Units::default(), model().replicated_params() as usize * 12);
        }
        assert_eq!(intake.check_complete(), Ok(()));
        let digest = held.is_none().then(|| old[0].replicated_digest());
        assert_eq!(intake.replicated_digest(), digest);
        intake
    });
    let intakes: Vec<_> = intakes.collect();
    let mut shards = old;
    shards.truncate(owned.len());
    shards.resize_with(owned.len(), || Shard::empty(&model()));
    for ((shard, owned), intake) in shards.iter_mut().zip(owned).zip(intakes) {
        shard.adopt(owned, intake);
    }
    shards
}

#[test]
fn shards_that_change_in_place_are_those_made_anew() {
    let layouts = [split(&model(), 4), scattered(&model(), 3), split(&model(), 2), scattered(&model(), 4)];
    for part in [4, 20, 1 << 10, 1 << 20] {
        let mut shards = start(&layouts[0]);
        train(&mut shards, 1..=2);
        for (round, owned) in layouts.iter().cycle().skip(1).take(6).enumerate() {
            let anew = move_to(&shards, owned);
            shards = adopt(shards, owned, part);
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
    let mut intake = Intake::<f32>::new(&model(), owned, true).expect("known units");
    let length = other[&axis].len() as usize * Shard::<f32>::unit_len(&model(), axis.family) * 12;
    let mut bytes = vec![0; length];
    source.export_part(Some(axis), &other[&axis], 0, &mut bytes).expect("owned");
    let refused = intake.import_part(Some(axis), &other[&axis], 0, &bytes);
    assert_eq!(refused, Err(RebuildError::Unexpected { axis: Some(axis), units: other[&axis].clone() }));
    assert!(matches!(intake.check_complete(), Err(RebuildError::Missing { unit: 0, .. })));
    let none = Intake::<f32>::new(&model(), &Owned::new(), true).expect("nothing");
    assert_eq!(none.check_complete(), Err(RebuildError::MissingReplicated));
    let beyond = [(axis, Units::range(0, 1000))].into();
    assert!(matches!(Intake::<f32>::new(&model(), &beyond, false), Err(RebuildError::Unknown { .. })));
}

#[test]
fn four_ranks_to_three_and_back_keeps_every_bit() {
    let (four, three) = (split(&model(), 4), scattered(&model(), 3));
    let mut never_moved = start(&four);
    train(&mut never_moved, 1..=3);
    let mut moved = start(&four);
    train(&mut moved, 1..=3);
    let before = state(&moved);
    let on_three = move_to(&moved, &three);
    assert_eq!(state(&moved), before, "the old shards are only read");
    drop(moved);
    let mut back = move_to(&on_three, &four);
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
fn what_is_missing_is_named() {
    let owned = everything(&model());
    let whole = Shard::<f32>::init(&model(), 3, &owned);
    let half = &split(&model(), 2)[0];
    let part = Shard::<f32>::init(&model(), 3, half);
    let nothing = Received::new();
    let rebuild =
        |owned: &Owned, old, received: &Received| Shard::<f32>::rebuild(&model(), owned, old, received).err();

    assert_eq!(rebuild(half, Some(&part), &nothing), None);
    let missing = RebuildError::Missing { axis: Axis::attn(0), unit: 3 };
    assert_eq!(missing.to_string(), "unit 3 of attn/0 is neither held nor received");
    assert_eq!(rebuild(&owned, Some(&part), &nothing), Some(missing));
    assert_eq!(rebuild(&Owned::new(), None, &nothing), Some(RebuildError::MissingReplicated));

    let mut short = everything_from(std::slice::from_ref(&whole));
    short.set_replicated(vec![0; 7]);
    let length = 5 * 16 * 4 * 3;
    assert_eq!(
        rebuild(&owned, None, &short),
        Some(RebuildError::ReplicatedLength { got: 7, expected: length })
    );
    let mut short = Received::new();
    short.add_units(Axis::ffn(0), Units::range(2, 4), vec![0; 5]);
    let wanted = Owned::from([(Axis::ffn(0), Units::range(3, 4))]);
    let expected = RebuildError::Length {
        axis: Axis::ffn(0),
        units: Units::range(2, 4),
        got: 5,
        expected: 2 * 3 * 3 * 16 * 4 * 3,
    };
    assert_eq!(rebuild(&wanted, None, &short), Some(expected));

    let beyond = Owned::from([(Axis::attn(2), Units::range(0, 1))]);
    let unknown = RebuildError::Unknown { axis: Axis::attn(2), units: Units::range(0, 1) };
    assert_eq!(rebuild(&beyond, Some(&whole), &nothing), Some(unknown));
    let other = ModelSpec { ffn_block: 6, ..model() };
    let error = Shard::<f32>::rebuild(&other, &owned, Some(&whole), &nothing).err();
    assert_eq!(error, Some(RebuildError::OtherModel));
}

#[test]
fn units_of_others_are_refused() {
    let half = &split(&model(), 2)[0];
    let mut shard = Shard::<f32>::init(&model(), 3, half);
    let axis = Axis::attn(0);
    let refused = ShardError::NotOwned { axis, unit: 3, owned: Units::range(0, 3) };
    let (mut bytes, mut values) = (vec![1], vec![1.0]);
    assert_eq!(shard.export_units(axis, &Units::range(2, 5), &mut bytes), Err(refused.clone()));
    assert_eq!(shard.copy_gradients(axis, &Units::range(2, 5), &mut values), Err(refused.clone()));
    assert_eq!(shard.digest(axis, 3), Err(refused.clone()));
    assert_eq!(shard.set_gradients(axis, &Units::range(3, 4), &[]), Err(refused));
    assert!(bytes == [1] && values == [1.0]);
    let error = shard.set_gradients(axis, &Units::range(0, 1), &[0.0; 3]);
    assert!(matches!(error, Err(ShardError::Length { got: 3, expected: 384, .. })), "{error:?}");
    let error = shard.set_replicated_gradients(&[0.0]);
    assert_eq!(error, Err(ShardError::ReplicatedLength { got: 1, expected: 80 }));
}
