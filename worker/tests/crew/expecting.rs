//! Room that is made before there is a plan, for what a rank expects of it.

use crate::recovery::{LOST, bereaved, undisturbed, worst};
use reknit_layout::{Axis, Place, Units};
use reknit_worker::messages::Phase;
use std::collections::BTreeMap;

fn lens(owned: &BTreeMap<Axis, Units>) -> Vec<u32> {
    owned.values().map(Units::len).collect()
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
    let layout = crew.plan(true).unwrap().plan.layout;
    let everything: BTreeMap<_, _> = layout.groups[0]
        .partitions
        .iter()
        .map(|(axis, sets)| (*axis, sets.iter().fold(Units::default(), |all, units| all.union(units))))
        .collect();
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
