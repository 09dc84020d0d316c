//! Room that is made before there is a plan, for what a rank expects of it.

use crate::crew::{Crew, job};
use crate::fault::How;
use crate::recovery::{LOST, answer_of_the_vote, bereaved, undisturbed, worst};
use reknit_layout::{Axis, Place, Units};
use reknit_worker::messages::Phase;
use std::collections::BTreeMap;

fn lens(owned: &BTreeMap<Axis, Units>) -> Vec<u32> {
    owned.values().map(Units::len).collect()
}

/// Every unit of the model.
fn everything(crew: &mut Crew<f64>) -> BTreeMap<Axis, Units> {
    let partitions = &crew.plan(true).unwrap().plan.layout.groups[0].partitions;
    let union = |sets: &Vec<Units>| sets.iter().fold(Units::default(), |all, units| all.union(units));
    partitions.iter().map(|(axis, sets)| (*axis, union(sets))).collect()
}

#[test]
fn who_lost_a_rank_of_its_group_expects_nearly_what_the_plan_brings() {
    let dir = tempfile::tempdir().unwrap();
    let (mut crew, lost) = bereaved(&dir);
    let mut expected = Vec::new();
    for seat in &mut crew.seats {
        let owned = seat.rank.owned_without(&lost);
        assert_eq!(owned.is_some(), seat.place.replica == LOST.replica, "{}", seat.place);
        if let Some(owned) = owned {
            expected.push((seat.place, lens(&owned)));
            seat.rank.expect(&owned);
        }
    }
    let plan = crew.reform(false).unwrap();
    let group = plan.layout.group(LOST.replica, LOST.stage).unwrap();
    let came = |place: Place| lens(&group.owned(place.slot));
    for (place, expected) in &expected {
        let more: Vec<_> =
            came(*place).iter().zip(expected).map(|(came, expected)| came - expected).collect();
        assert!(more.iter().all(|more| *more <= 1), "{place} expects {expected:?} and gets {more:?} more");
    }
    assert!(crew.train_to(12));
    crew.check_samples();
    crew.digest();
    assert!(worst(&crew.losses, &undisturbed::<f64>(2, 4, "f64", 12).losses) <= 1e-10);
}

#[test]
fn what_was_expected_wrongly_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (mut crew, _) = bereaved(&dir);
    let everything = everything(&mut crew);
    let held = crew.held();
    crew.seats.iter_mut().for_each(|seat| seat.rank.expect(&everything));
    assert_eq!(crew.held(), held);

    // One without a place in the next layout takes nothing of it.
    let mut left_out = crew.dismiss(Place::new(1, 0, 3));
    let orders = crew.plan(false).unwrap();
    let prepare = orders.of(&left_out.worker);
    let before = left_out.rank.state(Phase::Quiesced).holding;
    left_out.rank.leave_epoch();
    left_out.rank.prepare(&prepare).unwrap();
    assert!(left_out.rank.resume(prepare.epoch));
    assert_eq!(left_out.rank.state(Phase::Quiesced).holding, before);

    crew.carry_out(orders).unwrap();
    assert_eq!(crew.degrees, [[4, 4], [4, 2]]);
    assert!(crew.train_to(12));
    crew.check_samples();
    crew.digest();
    assert!(worst(&crew.losses, &undisturbed::<f64>(2, 4, "f64", 12).losses) <= 1e-10);
}

#[test]
fn a_step_is_rolled_forward_as_if_there_were_no_room() {
    let dir = tempfile::tempdir().unwrap();
    let mut crew = Crew::<f64>::start(job(dir.path(), "f64", 2, 4, 8));
    assert!(crew.train_to(3));
    crew.arm(LOST, answer_of_the_vote(How::LoseAnswer));
    assert!(!crew.train_to(8));
    let everything = everything(&mut crew);
    crew.seat(LOST).rank.expect(&everything);
    crew.reform(false).unwrap();
    assert_eq!(crew.rolled_forward, 1);
    assert!(crew.train_to(8));
    crew.digest();
    assert_eq!(crew.losses, undisturbed::<f64>(2, 4, "f64", 8).losses, "the same bits");
}
