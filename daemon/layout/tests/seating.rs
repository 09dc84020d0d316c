//! Which GPU sits where: the nominal seating, spares, modes and packing.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::job;
use proptest::prelude::*;
use reknit_layout::topology::Domain;
use reknit_layout::*;
use std::collections::{BTreeMap, BTreeSet};

fn shaped(data: u32, pipeline: u32, tensor: u32, spares: u32) -> JobSpec {
    let mut job = job(data, tensor, tensor, tensor, tensor.max(8));
    job.parallel.pipeline = pipeline;
    job.recovery.spares = spares;
    job
}

fn racks(sizes: &[u32]) -> Topology {
    let entry = |(index, size)| {
        format!("[[domain]]\nname = \"d{index}\"\nnodes = [{{ name = \"n{index}\", gpus = {size} }}]\n")
    };
    let text: String = sizes.iter().enumerate().map(entry).collect();
    Topology::parse(&text, "racks").unwrap()
}

fn gpus<const N: usize>(names: [&str; N]) -> BTreeSet<GpuId> {
    names.map(GpuId::from).into()
}

fn at(seats: &Seats, place: (u32, u32, u32)) -> &str {
    &seats.get(Place::new(place.0, place.1, place.2)).unwrap().0
}

fn places<const N: usize>(places: [(u32, u32, u32); N]) -> BTreeSet<Place> {
    places.map(|(replica, stage, slot)| Place::new(replica, stage, slot)).into()
}

#[test]
fn groups_in_order_fill_domains_in_order() {
    let job = shaped(2, 2, 2, 0);
    // d0 holds one group, d1 none, d2 two; one more is in d3.
    let topology = racks(&[3, 1, 4, 5]);
    let seats = seat(&job, &topology).unwrap();
    let names: Vec<_> = seats.iter().map(|(_, gpu)| gpu.0.as_str()).collect();
    assert_eq!(names, ["n0/0", "n0/1", "n2/0", "n2/1", "n2/2", "n2/3", "n3/0", "n3/1"]);
    assert_eq!(at(&seats, (1, 1, 1)), "n3/1");
    assert_eq!(seats.place_of(&GpuId::from("n2/3")), Some(Place::new(1, 0, 1)));
    assert_eq!(seats.place_of(&GpuId::from("n1/0")), None);
    for outside in [(2, 0, 0), (0, 2, 0), (0, 0, 2), (u32::MAX, u32::MAX, u32::MAX)] {
        assert_eq!(seats.get(Place::new(outside.0, outside.1, outside.2)), None);
    }
}

#[test]
fn a_topology_too_small_says_for_which_group() {
    let job = shaped(3, 2, 4, 0);
    let error = seat(&job, &racks(&[9, 7, 3])).unwrap_err();
    assert_eq!(
        (error.replica, error.stage, error.needs, error.most, error.free),
        (ReplicaId(1), StageId(1), 4, 3, 7)
    );
    let text = error.to_string();
    assert!(text.starts_with("no domain has room for replica 1 stage 1: it needs 4 free GPUs"), "{text}");
    assert!(text.contains("no domain has more than 3 (7 in all)"), "{text}");
    assert_eq!(seat(&job, &Topology::default()).unwrap_err().free, 0);
}

#[test]
fn without_spares_the_lost_slot_is_out_and_nothing_else_changes() {
    let job = shaped(2, 2, 4, 0);
    let topology = Topology::nominal(&job);
    let seats = seat(&job, &topology).unwrap();
    let after = reseat(&job, &topology, &seats, &gpus(["r1-s0/2"]), Mode::Ntp);
    assert_eq!(after, Seating { seats, inactive: places([(1, 0, 2)]) });
    assert_eq!(after.active().count(), 15);
    assert!(after.active().all(|(place, gpu)| place != Place::new(1, 0, 2) && gpu.0 != "r1-s0/2"));
}

#[test]
fn a_free_gpu_of_the_own_domain_takes_the_place() {
    let job = shaped(2, 1, 4, 1);
    let topology = Topology::nominal(&job);
    let seats = seat(&job, &topology).unwrap();
    let one = reseat(&job, &topology, &seats, &gpus(["r1-s0/2"]), Mode::Ntp);
    assert!(one.inactive.is_empty());
    assert_eq!(at(&one.seats, (1, 0, 2)), "r1-s0/4");
    assert_eq!(one.seats.moved().map(|(place, _)| place).collect::<Vec<_>>(), [Place::new(1, 0, 2)]);
    assert_eq!(one.seats.place_of(&GpuId::from("r1-s0/2")), None);

    // The job may use one spare in all.
    let two = reseat(&job, &topology, &one.seats, &gpus(["r1-s0/2", "r0-s0/0"]), Mode::Ntp);
    assert_eq!(two, Seating { seats: one.seats.clone(), inactive: places([(0, 0, 0)]) });

    // The spare that is lost too leaves its seat to nobody; the one that it replaced is back and takes it.
    let back = reseat(&job, &topology, &one.seats, &gpus(["r1-s0/4"]), Mode::Ntp);
    assert_eq!(back, Seating { seats, inactive: BTreeSet::new() });
}

#[test]
fn a_gpu_that_is_back_is_no_spare_and_comes_first() {
    let job = shaped(1, 1, 4, 2);
    let topology = Topology::nominal(&job);
    let seats = seat(&job, &topology).unwrap();
    let one = reseat(&job, &topology, &seats, &gpus(["r0-s0/3"]), Mode::Ntp);
    let next = reseat(&job, &topology, &one.seats, &gpus(["r0-s0/0"]), Mode::Ntp);
    assert_eq!((at(&next.seats, (0, 0, 3)), at(&next.seats, (0, 0, 0))), ("r0-s0/4", "r0-s0/3"));
    assert_eq!(next.seats.spares().count(), 1);
}

#[test]
fn a_group_moves_to_a_free_domain_when_there_are_spares_enough() {
    let topology = racks(&[4, 4, 4]);
    let gone = gpus(["n0/1", "n0/3"]);
    let few = shaped(2, 1, 4, 3);
    let seats = seat(&few, &topology).unwrap();
    assert_eq!(reseat(&few, &topology, &seats, &gone, Mode::Ntp).inactive, places([(0, 0, 1), (0, 0, 3)]));
    let enough = shaped(2, 1, 4, 4);
    let moved = reseat(&enough, &topology, &seats, &gone, Mode::Ntp);
    assert!(moved.inactive.is_empty());
    assert_eq!(
        (0..4).map(|slot| at(&moved.seats, (0, 0, slot))).collect::<Vec<_>>(),
        ["n2/0", "n2/1", "n2/2", "n2/3"]
    );
    assert_eq!(moved.seats.spares().count(), 4);
    // Those that were left behind are free; another group does not sit there and is reduced.
    let next = reseat(&enough, &topology, &moved.seats, &gpus(["n0/1", "n0/3", "n1/0"]), Mode::Ntp);
    assert_eq!(next, Seating { seats: moved.seats, inactive: places([(1, 0, 0)]) });
}

#[test]
fn what_a_group_leaves_behind_helps_its_neighbour_in_the_rack() {
    // Two groups in d0, d1 is free. Both lose GPUs: one moves, its survivors make the other whole.
    let job = shaped(2, 1, 4, 4);
    let topology = racks(&[8, 4]);
    let seats = seat(&job, &topology).unwrap();
    let after = reseat(&job, &topology, &seats, &gpus(["n0/0", "n0/7"]), Mode::Ntp);
    assert!(after.inactive.is_empty());
    assert_eq!(at(&after.seats, (0, 0, 0)), "n1/0");
    assert_eq!((at(&after.seats, (1, 0, 2)), at(&after.seats, (1, 0, 3))), ("n0/6", "n0/1"));
}

#[test]
fn when_not_all_can_be_replaced_some_are() {
    let job = shaped(1, 1, 4, 8);
    let topology = racks(&[5]);
    let seats = seat(&job, &topology).unwrap();
    let after = reseat(&job, &topology, &seats, &gpus(["n0/1", "n0/2"]), Mode::Ntp);
    assert_eq!(after.inactive, places([(0, 0, 2)]));
    assert_eq!(at(&after.seats, (0, 0, 1)), "n0/4");
}

#[test]
fn modes_take_the_highest_healthy_slots_out() {
    let job = shaped(3, 2, 8, 0);
    let topology = Topology::nominal(&job);
    let seats = seat(&job, &topology).unwrap();
    let gone = gpus(["r0-s0/7", "r2-s0/0", "r2-s0/1"]);
    let inactive = |mode| {
        let after = reseat(&job, &topology, &seats, &gone, mode);
        assert_eq!(after.seats, seats);
        let mut groups: BTreeMap<(u32, u32), Vec<u32>> = BTreeMap::new();
        for place in after.inactive {
            groups.entry((place.replica.0, place.stage.0)).or_default().push(place.slot.0);
        }
        groups
    };
    assert_eq!(inactive(Mode::Ntp), [((0, 0), vec![7]), ((2, 0), vec![0, 1])].into());
    let all = (0..8).collect::<Vec<_>>();
    let whole = [(0, 0), (0, 1), (2, 0), (2, 1)].map(|group| (group, all.clone()));
    assert_eq!(inactive(Mode::DropReplica), whole.into());
    let uniform = [((0, 0), vec![6, 7]), ((0, 1), vec![6, 7]), ((2, 0), vec![0, 1]), ((2, 1), vec![6, 7])];
    assert_eq!(inactive(Mode::UniformReduction), uniform.into());
    let powers = [((0, 0), vec![4, 5, 6, 7]), ((2, 0), vec![0, 1, 6, 7])];
    assert_eq!(inactive(Mode::PowerOfTwo), powers.into());
}

#[test]
fn reduced_domains_of_other_stages_come_to_one_replica() {
    let job = shaped(3, 2, 4, 0);
    let topology = Topology::nominal(&job);
    let seats = seat(&job, &topology).unwrap();
    let gone = gpus(["r1-s0/2", "r2-s1/3"]);
    let after = reseat(&job, &topology, &seats, &gone, Mode::Ntp);
    assert_eq!(after.inactive, places([(1, 0, 2), (1, 1, 3)]));
    for slot in 0..4 {
        assert_eq!(at(&after.seats, (1, 1, slot)), format!("r2-s1/{slot}"));
        assert_eq!(at(&after.seats, (2, 1, slot)), format!("r1-s1/{slot}"));
    }
    assert_eq!(after.seats.moved().count(), 8);
    for mode in [Mode::UniformReduction, Mode::DropReplica] {
        assert_eq!(reseat(&job, &topology, &seats, &gone, mode).seats, seats);
    }
    // Repaired, every GPU trains where it sits.
    let repaired = reseat(&job, &topology, &after.seats, &BTreeSet::new(), Mode::Ntp);
    assert_eq!(repaired, Seating { seats: after.seats, inactive: BTreeSet::new() });
}

#[test]
fn a_stopped_replica_takes_the_reduced_groups_of_others() {
    let mut job = shaped(2, 2, 4, 0);
    job.parallel.min_tensor = 3;
    let topology = Topology::nominal(&job);
    let seats = seat(&job, &topology).unwrap();
    let gone = gpus(["r0-s1/0", "r1-s0/1", "r1-s0/2"]);
    let after = reseat(&job, &topology, &seats, &gone, Mode::Ntp);
    let reduced: BTreeSet<ReplicaId> = after.inactive.iter().map(|place| place.replica).collect();
    assert_eq!(reduced.len(), 1);

    // Whether two or more are gone of a group that needs three of four is all the same.
    let gone = ["r0-s0/0", "r0-s0/1", "r0-s0/2", "r0-s1/0", "r0-s1/1", "r1-s0/0", "r1-s0/1"];
    let more = ["r1-s1/0", "r1-s1/1", "r1-s1/2"];
    let gone: BTreeSet<GpuId> = gone.into_iter().chain(more).map(GpuId::from).collect();
    assert_eq!(reseat(&job, &topology, &seats, &gone, Mode::Ntp).seats, seats);
}

#[test]
fn modes_have_names() {
    for mode in Mode::ALL {
        assert_eq!(mode.to_string().parse(), Ok(mode));
        assert_eq!(serde_json::to_value(mode).unwrap(), mode.to_string());
    }
    let error = "NTP".parse::<Mode>().unwrap_err().to_string();
    assert_eq!(
        error,
        "`NTP` is not a mode: allowed are ntp, uniform_reduction, drop_replica and power_of_two"
    );
}

#[derive(Debug)]
struct Case {
    job: JobSpec,
    topology: Topology,
    /// One after the other: who is gone.
    gone: Vec<BTreeSet<GpuId>>,
    mode: Mode,
}

fn case() -> impl Strategy<Value = Case> {
    let shape = (1..=4_u32, 1..=3_u32, 1..=5_u32, 0..=6_u32, 0..4_usize);
    let topology = prop::option::of(prop::collection::vec(1..=17_u32, 0..6));
    let gone = prop::collection::vec(prop::collection::vec(any::<prop::sample::Index>(), 0..10), 1..5);
    (shape, topology, gone).prop_map(|((data, pipeline, tensor, spares, mode), sizes, gone)| {
        let mut job = shaped(data, pipeline, tensor, spares);
        job.parallel.min_tensor = 1 + data % tensor;
        let topology = match sizes {
            None => Topology::nominal(&job),
            Some(mut sizes) => {
                sizes.extend(vec![tensor; (data * pipeline) as usize]);
                racks(&sizes)
            }
        };
        let all: Vec<GpuId> = topology.domains().iter().flat_map(|domain| domain.gpus()).cloned().collect();
        let set = |picks: Vec<prop::sample::Index>| picks.iter().map(|pick| pick.get(&all).clone()).collect();
        let gone = gone.into_iter().map(set).collect();
        Case { job, topology, gone, mode: Mode::ALL[mode] }
    })
}

type Group = (ReplicaId, StageId);

fn groups(seating: &Seating) -> BTreeMap<Group, Vec<(Slot, GpuId, bool)>> {
    let mut groups: BTreeMap<Group, Vec<_>> = BTreeMap::new();
    for (place, gpu) in seating.seats.iter() {
        let active = !seating.inactive.contains(&place);
        groups.entry((place.replica, place.stage)).or_default().push((place.slot, gpu.clone(), active));
    }
    groups
}

proptest! {
    #![proptest_config(common::cases(2000))]

    #[test]
    fn any_sequence_of_losses_and_returns_keeps_the_rules(case in case()) {
        let Case { job, topology, gone, mode } = case;
        let nominal = seat(&job, &topology).unwrap();
        let nominal_gpus: BTreeSet<&GpuId> = nominal.iter().map(|(_, gpu)| gpu).collect();
        let mut seats = nominal.clone();
        let domain = |slots: &[(Slot, GpuId, bool)]| topology.domain_of(&slots[0].1);
        let spares = |seats: &Seats| seats.iter().filter(|(_, gpu)| !nominal_gpus.contains(gpu)).count();
        for gone in &gone {
            let after = reseat(&job, &topology, &seats, gone, mode);

            // Every place has one GPU, none has two places, and look-ups agree.
            let all: Vec<(Place, &GpuId)> = after.seats.iter().collect();
            let places: Vec<Place> = nominal.iter().map(|(place, _)| place).collect();
            prop_assert_eq!(all.iter().map(|(place, _)| *place).collect::<Vec<_>>(), places);
            prop_assert_eq!(all.iter().map(|(_, gpu)| gpu).collect::<BTreeSet<_>>().len(), all.len());
            for (place, gpu) in &all {
                prop_assert_eq!(after.seats.get(*place), Some(*gpu));
                prop_assert_eq!(after.seats.place_of(gpu), Some(*place));
            }
            let seated = topology.domains().iter().flat_map(Domain::gpus);
            prop_assert_eq!(seated.filter(|gpu| after.seats.place_of(gpu).is_some()).count(), all.len());
            let changed = all.iter().filter(|(place, gpu)| nominal.get(*place) != Some(*gpu));
            prop_assert!(changed.copied().eq(after.seats.moved()));

            // Spares within their number; who is gone does not train.
            prop_assert_eq!(after.seats.spares().count(), spares(&after.seats));
            prop_assert!(spares(&after.seats) <= job.recovery.spares as usize);
            prop_assert!(after.active().all(|(_, gpu)| !gone.contains(gpu)));

            let (before, now) = (groups(&Seating { seats: seats.clone(), inactive: BTreeSet::new() }), groups(&after));
            let lost = |slots: &[(Slot, GpuId, bool)]| slots.iter().filter(|(_, gpu, _)| gone.contains(gpu)).count();
            let most = now.values().map(|slots| lost(slots)).max().unwrap();

            // A group stays together with its slots and in its stage, and unless it is packed in its replica. Only a
            // group that has lost GPUs gets others: in their slots, or in all when it may move to another domain.
            for ((replica, stage), old) in &before {
                let stays = |slots: &[(Slot, GpuId, bool)]| {
                    let mut pairs = old.iter().zip(slots);
                    pairs.all(|((_, old, _), (_, new, _))| old == new || gone.contains(old))
                };
                let mut groups = now.iter().filter(|((_, s), _)| s == stage);
                let found = groups.find(|(_, slots)| stays(slots) && domain(slots) == domain(old));
                prop_assert!(found.is_some() || lost(old) > 0 && job.recovery.spares >= job.parallel.tensor);
                if let (Some(((now_at, _), slots)), 0) = (found, lost(old)) {
                    prop_assert!(old.iter().map(|(_, gpu, _)| gpu).eq(slots.iter().map(|(_, gpu, _)| gpu)));
                    prop_assert!(now_at == replica || mode == Mode::Ntp || mode == Mode::PowerOfTwo);
                }
            }
            for ((replica, _), slots) in &now {
                let domains: BTreeSet<_> = slots.iter().map(|(_, gpu, _)| topology.domain_of(gpu)).collect();
                prop_assert!(domains.len() == 1 && !domains.contains(&None));

                // The active slots are those that the mode says.
                let left: Vec<Slot> =
                    slots.iter().filter(|(_, gpu, _)| !gone.contains(gpu)).map(|(slot, _, _)| *slot).collect();
                let hit = |replica| now.iter().any(|((r, _), slots)| *r == replica && lost(slots) > 0);
                let degree = match mode {
                    Mode::Ntp => left.len(),
                    Mode::UniformReduction if hit(*replica) => slots.len() - most,
                    Mode::DropReplica if hit(*replica) => 0,
                    Mode::PowerOfTwo if lost(slots) > 0 => (0..).map(|n| 1 << n).take_while(|power| *power <= left.len()).last().unwrap_or(0),
                    Mode::UniformReduction | Mode::DropReplica | Mode::PowerOfTwo => left.len(),
                };
                let active: Vec<Slot> =
                    slots.iter().filter(|(_, _, active)| *active).map(|(slot, _, _)| *slot).collect();
                prop_assert_eq!(active, &left[..degree]);
            }

            // As few replicas are reduced as there are reduced groups in a stage.
            if matches!(mode, Mode::Ntp | Mode::PowerOfTwo) {
                let reduced: BTreeSet<Group> =
                    after.inactive.iter().map(|place| (place.replica, place.stage)).collect();
                let replicas: BTreeSet<ReplicaId> = reduced.iter().map(|(replica, _)| *replica).collect();
                let of_stage = |stage| reduced.iter().filter(|(_, s)| *s == stage).count();
                prop_assert_eq!(replicas.len(), job.stages().map(of_stage).max().unwrap());
            }

            // A spare that could help is used: no group with all its losses to be replaced in its domain is left.
            let budget = job.recovery.spares as usize - spares(&after.seats);
            for slots in now.values().filter(|slots| lost(slots) > 0) {
                let domain = &topology.domains()[topology.domain_of(&slots[0].1).unwrap()];
                let free = domain.gpus().filter(|gpu| !gone.contains(*gpu) && after.seats.place_of(gpu).is_none());
                let dead_spares = slots.iter().filter(|(_, gpu, _)| gone.contains(gpu) && !nominal_gpus.contains(gpu));
                let (nominal, spare): (Vec<_>, Vec<_>) = free.partition(|gpu| nominal_gpus.contains(gpu));
                prop_assert!(nominal.is_empty());
                prop_assert!(spare.is_empty() || budget + dead_spares.count() == 0 || job.recovery.spares == 0);
            }

            // Nothing more is to be done.
            prop_assert_eq!(&reseat(&job, &topology, &after.seats, gone, mode), &after);
            seats = after.seats;
        }
    }
}
