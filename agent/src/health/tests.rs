//! Stories of one node's GPUs: readings and events in, verdicts out.

use super::*;
use crate::policy::Policies;
use crate::probe::protocol::{Busy, FastSet, GpuIdentity, Reading, SlowSet};
use std::time::Duration;

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
const DAY: Duration = Duration::from_secs(86_400);

/// GPUs `a` to `d`, healthy, on a node that was booted a day ago.
struct Node {
    now: Millis,
    tracker: Tracker,
    fast: FastSet,
}

impl Node {
    fn new(policy: &str) -> Self {
        Self::remembering(policy, Memory::default())
    }

    fn remembering(policy: &str, memory: Memory) -> Self {
        Self::booted(policy, memory, "boot", DAY)
    }

    fn booted(policy: &str, memory: Memory, boot: &str, ago: Duration) -> Self {
        let now = Millis(1_000_000_000_000);
        let policies = Policies::parse(policy, "test").unwrap();
        let boot = Boot { id: boot.to_owned(), at: now.before(ago) };
        let mut tracker = Tracker::new(policies, boot, memory);
        for (uuid, index) in ["a", "b", "c", "d"].into_iter().zip(0..) {
            let gpu = GpuIdentity {
                uuid: uuid.into(),
                index,
                pci_bus_id: format!("00000000:0{index}:00.0"),
                name: "GPU".to_owned(),
                architecture: "hopper".to_owned(),
                memory_bytes: 1,
            };
            tracker.watch(&gpu, true);
        }
        let fast = FastSet {
            recovery_action: Some(0),
            ecc_uncorrected: Some(0),
            ecc_corrected: Some(0),
            links_active: Some(0b111),
            throttle: Some(0),
            temperature: Some(40),
            slowdown_temperature: Some(90),
            power_mw: Some(100_000),
            power_unreadable: false,
            utilization: Some(100),
        };
        Self { now, tracker, fast }
    }

    fn read(&mut self, gpu: &str, reading: Reading) -> Option<Verdict> {
        self.now = self.now.after(SECOND);
        self.tracker.reading(self.now, &gpu.into(), &reading).map(|transition| transition.verdict)
    }

    fn fast(&mut self, gpu: &str, change: impl FnOnce(&mut FastSet)) -> Option<Verdict> {
        let mut fast = self.fast.clone();
        change(&mut fast);
        self.read(gpu, Reading::Answers { fast, slow: None, reset: false })
    }

    fn slow(&mut self, gpu: &str, change: impl FnOnce(&mut SlowSet)) -> Option<Verdict> {
        let mut slow = Box::<SlowSet>::default();
        change(&mut slow);
        self.read(gpu, Reading::Answers { fast: self.fast.clone(), slow: Some(slow), reset: false })
    }

    fn healthy(&mut self, gpu: &str) -> Option<Verdict> {
        self.fast(gpu, |_| {})
    }

    /// Healthy reads, one a second, until the verdict changes.
    fn seconds_until_change(&mut self, gpu: &str, limit: u32) -> Option<(u32, Verdict)> {
        (1..=limit).find_map(|second| self.healthy(gpu).map(|verdict| (second, verdict)))
    }

    fn gone(&mut self, gpu: &str) -> Option<Verdict> {
        self.read(gpu, Reading::Gone { error: "NVML code 15".to_owned() })
    }

    fn xid(&mut self, gpu: &str, number: u64) -> Option<Verdict> {
        self.logged(gpu, number, None)
    }

    fn logged(&mut self, gpu: &str, number: u64, log: Option<&str>) -> Option<Verdict> {
        let transition = self.tracker.xid(self.now, &gpu.into(), &XidSeen { number, log });
        transition.map(|transition| transition.verdict)
    }

    fn class(&self, gpu: &str) -> Class {
        self.tracker.verdict(&gpu.into()).unwrap().class
    }

    fn wait(&mut self, time: Duration) {
        self.now = self.now.after(time);
    }
}

fn class(verdict: Option<Verdict>) -> Option<Class> {
    verdict.map(|verdict| verdict.class)
}

#[test]
fn gone_once_is_a_glitch_and_twice_a_fault() {
    let mut node = Node::new("");
    assert_eq!(node.gone("a"), None);
    assert_eq!(node.healthy("a"), None);
    assert_eq!(node.gone("a"), None);
    let fatal = node.gone("a").unwrap();
    assert_eq!((fatal.class, fatal.shards_readable), (Class::Fatal, false));
    assert_eq!(fatal.rejoin, "when the signal is gone, then 5s of healthy reads");
    assert_eq!(node.gone("a"), None, "told once");
    assert_eq!(node.class("b"), Class::Healthy);
    let (seconds, healthy) = node.seconds_until_change("a", 60).unwrap();
    assert_eq!((seconds, healthy.class), (7, Class::Healthy), "two reads, then five seconds");
}

#[test]
fn a_gpu_that_comes_and_goes_is_held_longer_each_time_and_then_for_a_person() {
    let mut node = Node::new("");
    let mut held = Vec::new();
    for _ in 0..4 {
        node.gone("a");
        assert_eq!(class(node.gone("a")), Some(Class::Fatal));
        held.push(node.seconds_until_change("a", 600).unwrap().0);
        node.wait(MINUTE);
    }
    assert_eq!(held, [7, 12, 22, 42]);
    node.gone("a");
    let fatal = node.gone("a").unwrap();
    assert_eq!(fatal.class, Class::Fatal);
    assert_eq!(fatal.rejoin, "when the signal is gone, then when an operator restores it");
    assert_eq!(node.seconds_until_change("a", 600), None);
    let rejoin = &node.tracker.verdict(&"a".into()).unwrap().rejoin;
    assert!(rejoin.starts_with("when an operator restores it: it was taken out 5 times"), "{rejoin}");
    let now = node.now;
    let restored = node.tracker.release(now, &"a".into()).unwrap();
    assert_eq!(restored.verdict.class, Class::Healthy);
    node.wait(2 * DAY);
    node.gone("a");
    node.gone("a");
    assert_eq!(node.seconds_until_change("a", 60).unwrap().0, 7, "the past is forgotten");
}

#[test]
fn relapses_after_a_day_are_none() {
    let mut node = Node::new("");
    for _ in 0..6 {
        node.gone("a");
        node.gone("a");
        assert_eq!(node.seconds_until_change("a", 60).unwrap().0, 7);
        node.wait(DAY);
    }
}

#[test]
fn an_xid_after_the_reading_explains_it_once() {
    let mut node = Node::new("");
    node.gone("a");
    assert_eq!(class(node.gone("a")), Some(Class::Fatal));
    let explained = node.xid("a", 79).unwrap();
    assert_eq!(explained.cause, "XID 79: GPU has fallen off the bus");
    assert_eq!(node.xid("a", 79), None, "told once");
    assert_eq!(node.gone("a"), None);
    assert_eq!(class(node.seconds_until_change("a", 60).map(|(_, v)| v)), Some(Class::Healthy));
}

#[test]
fn xid_79_condemns_at_once_and_only_an_outage_lifts_it() {
    let mut node = Node::new("");
    let fatal = node.xid("a", 79).unwrap();
    assert_eq!(fatal.rejoin, "after a reset of the GPU or a reboot, then 5s of healthy reads");
    assert_eq!(node.seconds_until_change("a", 100), None);
    assert_eq!(node.gone("a"), None);
    assert_eq!(node.seconds_until_change("a", 100), None, "a glitch is no outage");
    assert_eq!(node.gone("a"), None);
    assert_eq!(node.gone("a"), None);
    assert_eq!(class(node.seconds_until_change("a", 60).map(|(_, v)| v)), Some(Class::Healthy));
}

#[test]
fn a_reset_is_seen_by_a_stale_handle_or_by_counters_that_begin_anew() {
    let mut node = Node::new("");
    node.fast.ecc_corrected = Some(7);
    node.healthy("a");
    node.xid("a", 95);
    assert_eq!(node.seconds_until_change("a", 20), None);
    node.fast.ecc_corrected = Some(0);
    assert_eq!(class(node.seconds_until_change("a", 60).map(|(_, v)| v)), Some(Class::Healthy));
    node.xid("b", 95);
    let reading = Reading::Answers { fast: node.fast.clone(), slow: None, reset: true };
    assert_eq!(node.read("b", reading), None);
    assert_eq!(class(node.seconds_until_change("b", 60).map(|(_, v)| v)), Some(Class::Healthy));
}

#[test]
fn a_reboot_lifts_what_a_reset_would_and_keeps_what_an_operator_must_see() {
    let mut node = Node::new("");
    node.xid("a", 95);
    node.slow("b", |slow| slow.remap_failure = Some(true));
    assert_eq!((node.class("a"), node.class("b")), (Class::Fatal, Class::Drain));
    let text = serde_json::to_string(&node.tracker.memory()).unwrap();
    let restarted = Node::remembering("", serde_json::from_str(&text).unwrap());
    assert_eq!((restarted.class("a"), restarted.class("b")), (Class::Fatal, Class::Drain));
    assert_eq!(serde_json::to_string(&restarted.tracker.memory()).unwrap(), text);

    let mut booted = Node::booted("", serde_json::from_str(&text).unwrap(), "another", MINUTE);
    assert_eq!(booted.class("a"), Class::Fatal, "until it was read");
    assert_eq!(class(booted.seconds_until_change("a", 60).map(|(_, v)| v)), Some(Class::Healthy));
    assert_eq!(booted.seconds_until_change("b", 60), None);
}

#[test]
fn contained_errors_never_latch_the_gpu_but_three_in_a_day_drain_it() {
    let mut node = Node::new("");
    for _ in 0..2 {
        let died = node.xid("a", 94).unwrap();
        assert_eq!((died.class, died.shards_readable), (Class::RankDied, true));
        let (seconds, healthy) = node.seconds_until_change("a", 10).unwrap();
        assert_eq!((seconds, healthy.class), (2, Class::Healthy));
        node.wait(MINUTE);
    }
    assert_eq!(class(node.xid("a", 94)), Some(Class::Drain));
    let mut rarely = Node::new("risk.half_life = \"1h\"");
    for _ in 0..6 {
        assert_eq!(class(rarely.xid("a", 94)), Some(Class::RankDied));
        assert_eq!(class(rarely.seconds_until_change("a", 10).map(|(_, v)| v)), Some(Class::Healthy));
        rarely.wait(DAY / 2);
    }
}

#[test]
fn a_double_bit_error_waits_for_what_follows() {
    let mut contained = Node::new("");
    assert_eq!(class(contained.xid("a", 48)), Some(Class::RankDied));
    contained.wait(SECOND);
    let both = contained.xid("a", 94).unwrap();
    assert_eq!(both.class, Class::RankDied);
    assert_eq!(both.cause, "XID 48: double-bit memory error, then XID 94: contained memory error");
    assert_eq!(contained.seconds_until_change("a", 10).unwrap().1.class, Class::Healthy);

    let mut uncontained = Node::new("");
    uncontained.xid("a", 48);
    assert_eq!(class(uncontained.xid("a", 95)), Some(Class::Fatal));

    let mut remapped = Node::new("");
    remapped.xid("a", 171);
    let both = remapped.xid("a", 64).unwrap();
    assert_eq!((both.class, both.rejoin.as_str()), (Class::RankDied, "after a reset of the GPU or a reboot"));
    assert_eq!(remapped.seconds_until_change("a", 60), None);

    let mut late = Node::new("");
    late.xid("a", 48);
    late.wait(3 * SECOND);
    assert_eq!(class(late.xid("a", 64)), Some(Class::Drain), "too late to belong to it");

    let mut alone = Node::new("");
    alone.xid("a", 48);
    assert_eq!(alone.seconds_until_change("a", 10).unwrap().0, 2);
}

#[test]
fn the_log_and_nvml_tell_the_same_xid_once_in_either_order() {
    let line = "pid=1, name=python, GPU has fallen off the bus.";
    let mut node = Node::new("");
    assert_eq!(class(node.xid("a", 94)), Some(Class::RankDied));
    assert_eq!(node.logged("a", 94, Some(line)), None);
    node.wait(SECOND);
    assert_eq!(node.logged("a", 94, Some(line)), None);
    assert_eq!(node.class("a"), Class::RankDied, "one error, though three in a day would drain");
    assert!(node.tracker.verdict(&"a".into()).unwrap().evidence.is_empty().eq(&false));
    let mut node = Node::new("");
    let told = node.logged("a", 79, Some(line)).unwrap();
    assert_eq!(told.evidence, format!("kernel log: Xid 79, {line}"));
    assert_eq!(node.xid("a", 79), None);
}

#[test]
fn the_severity_word_decides_and_nonfatal_is_not_fatal() {
    let mut node = Node::new("");
    let mild = node.logged("a", 145, Some("RLW_CTRL Nonfatal XC0 i0 Link 04 (0x1)")).unwrap();
    assert_eq!(mild.class, Class::Predict);
    assert_eq!(node.xid("a", 145), None);
    assert_eq!(class(node.logged("b", 145, Some("RLW_CTRL Fatal XC0 i0 Link 04 (0x1)"))), Some(Class::Fatal));
    // The number alone is suspect; the word follows.
    assert_eq!(class(node.xid("c", 145)), Some(Class::Predict));
    assert_eq!(class(node.logged("c", 145, Some("RLW_CTRL Fatal XC0"))), Some(Class::Fatal));
    assert_eq!(node.class("a"), Class::Predict);
}

#[test]
fn a_peers_link_is_the_peers_fault() {
    let mut node = Node::new("");
    assert_eq!(node.logged("a", 149, Some("NETIR_LINK_EVT PEER_LINK_DOWN Link 08")), None);
    assert_eq!(node.class("a"), Class::Healthy);
    assert_eq!(node.tracker.ignored(&"a".into()).unwrap().class, Class::Ignore);
    assert_eq!(class(node.logged("b", 149, Some("NETIR_LINK_EVT LINK_DOWN Link 08"))), Some(Class::Fatal));
    assert_eq!(class(node.logged("c", 149, Some("NETIR_BER_EVENT Link 08"))), Some(Class::Predict));
    assert_eq!(class(node.logged("a", 149, Some("NETIR_LINK_EVT LINK_DOWN Link 09"))), Some(Class::Fatal));
    // NVML first, and the log takes the blame away.
    assert_eq!(class(node.xid("d", 149)), Some(Class::Predict));
    assert_eq!(class(node.logged("d", 149, Some("PEER_LINK_DOWN"))), Some(Class::Healthy));
}

#[test]
fn a_consequence_is_never_blamed_for_its_cause() {
    let mut node = Node::new("");
    assert_eq!(node.xid("a", 45), None);
    assert_eq!(class(node.xid("a", 95)), Some(Class::Fatal));
    assert_eq!(node.xid("a", 45), None);
    assert_eq!(node.xid("a", 119), None);
    assert_eq!(node.tracker.verdict(&"a".into()).unwrap().cause, "XID 95: uncontained memory error");
    for application in [8, 11, 13, 25, 31, 32, 37, 38, 39, 40, 41, 43, 44, 68, 69, 80, 137] {
        assert_eq!(node.xid("b", application), None, "{application}");
    }
    assert_eq!(node.class("b"), Class::Healthy);
    node.wait(MINUTE);
    assert_eq!(class(node.xid("b", 13)), Some(Class::Predict), "the second in a day on the same GPU");
}

#[test]
fn the_drivers_own_word_and_fallen_links_make_some_xids_worse() {
    let mut node = Node::new("");
    node.healthy("a");
    assert_eq!(class(node.xid("a", 109)), Some(Class::RankDied));
    let worse = node.fast("a", |fast| fast.recovery_action = Some(4)).unwrap();
    assert_eq!(worse.class, Class::Fatal);
    assert!(worse.evidence.ends_with("the driver asks for recovery"), "{}", worse.evidence);
    node.healthy("b");
    assert_eq!(class(node.xid("b", 74)), Some(Class::Drain));
    let worse = node.fast("b", |fast| fast.links_active = Some(0b101));
    assert_eq!(class(worse), Some(Class::Fatal), "at once, not after three reads");
    node.healthy("c");
    node.fast("c", |fast| fast.links_active = Some(0b101));
    assert_eq!(class(node.xid("c", 74)), Some(Class::Fatal));
}

#[test]
fn a_link_is_judged_against_its_own_baseline_or_its_siblings() {
    let mut node = Node::new("");
    for gpu in ["a", "b", "c"] {
        node.healthy(gpu);
    }
    // Link 3 exists and was never active on any GPU: nobody misses it.
    for _ in 0..2 {
        assert_eq!(node.fast("a", |fast| fast.links_active = Some(0b011)), None);
    }
    let down = node.fast("a", |fast| fast.links_active = Some(0b011)).unwrap();
    assert_eq!((down.class, down.evidence.as_str()), (Class::Fatal, "NVLink 2 inactive"));
    let (seconds, healthy) = node.seconds_until_change("a", 60).unwrap();
    assert_eq!((seconds, healthy.class), (7, Class::Healthy));
    // `d` was never seen with link 2, and all others have it.
    let down = (0..3).find_map(|_| node.fast("d", |fast| fast.links_active = Some(0b011)));
    assert_eq!(class(down), Some(Class::Fatal));
    let now = node.now;
    node.fast.links_active = Some(0b011);
    assert_eq!(node.tracker.release(now, &"d".into()).unwrap().verdict.class, Class::Healthy);
    assert_eq!(node.seconds_until_change("d", 60), None, "and stays so");
}

#[test]
fn an_operator_lifts_what_only_an_operator_lifts_and_nothing_that_is_still_wrong() {
    let mut node = Node::new("");
    for _ in 0..2 {
        node.slow("a", |slow| slow.remap_failure = Some(true));
        node.gone("b");
    }
    let now = node.now;
    assert_eq!(node.tracker.release(now, &"a".into()).unwrap().verdict.class, Class::Healthy);
    assert_eq!(node.tracker.release(now, &"b".into()), None, "it is still gone");
    assert_eq!(node.class("b"), Class::Fatal);
    for _ in 0..5 {
        assert_eq!(node.slow("a", |slow| slow.remap_failure = Some(true)), None, "forgiven");
    }
    for _ in 0..2 {
        assert_eq!(node.slow("a", |slow| slow.remap_failure = Some(false)), None);
    }
    assert_eq!(
        class(node.slow("a", |slow| slow.remap_failure = Some(true))),
        Some(Class::Drain),
        "another one"
    );
}

#[test]
fn a_planned_reboot_is_no_link_failure() {
    let mut node = Node::new("");
    node.healthy("a");
    let memory = node.tracker.memory();
    let mut booted = Node::booted("", memory, "another", MINUTE);
    for _ in 0..200 {
        assert_eq!(booted.fast("a", |fast| fast.links_active = Some(0)), None);
    }
    assert!(booted.now.since(Millis(1_000_000_000_000)) < 4 * MINUTE);
    booted.wait(2 * MINUTE);
    let down = (0..3).find_map(|_| booted.fast("a", |fast| fast.links_active = Some(0)));
    assert_eq!(class(down), Some(Class::Fatal), "five minutes after the boot they must be up");
}

#[test]
fn predictions_add_up_until_the_gpu_is_drained_while_it_can_still_send() {
    let mut node = Node::new("");
    node.slow("a", |slow| slow.remapped_rows = Some(0));
    let mut told = Vec::new();
    for rows in 1..=8 {
        let verdict = node.slow("a", |slow| slow.remapped_rows = Some(rows));
        told.extend(verdict.map(|verdict| (rows, verdict.class, verdict.cause, verdict.shards_readable)));
    }
    // Each comes a second after the last, so it goes on and counts once.
    assert_eq!(told.len(), 1, "{told:?}");
    for rows in 9..=20 {
        for _ in 0..2 {
            node.wait(MINUTE);
            node.slow("a", |slow| slow.remapped_rows = Some(rows - 1));
        }
        let verdict = node.slow("a", |slow| slow.remapped_rows = Some(rows));
        told.extend(verdict.map(|verdict| (rows, verdict.class, verdict.cause, verdict.shards_readable)));
    }
    let (_, class, cause, readable) = told.last().unwrap();
    assert_eq!((*class, cause.as_str(), *readable), (Class::Drain, "the GPU is likely to fail soon", true));
    let evidence = node.tracker.verdict(&"a".into()).unwrap().evidence.clone();
    assert!(evidence.contains("a memory row was remapped"), "{evidence}");
    assert_eq!(node.class("b"), Class::Healthy);
    node.wait(DAY);
    for _ in 0..2 {
        node.slow("a", |slow| slow.remapped_rows = Some(20));
    }
    assert_eq!(
        node.seconds_until_change("a", 60).unwrap().1.class,
        Class::Predict,
        "the last row is still news"
    );
    assert_eq!(node.seconds_until_change("a", 700).unwrap().1.class, Class::Healthy);
}

#[test]
fn a_prediction_is_forgotten_when_all_stays_quiet() {
    let mut node = Node::new("");
    assert_eq!(class(node.xid("a", 63)), Some(Class::Predict));
    let (seconds, healthy) = node.seconds_until_change("a", 1000).unwrap();
    assert_eq!((seconds, healthy.class), (600, Class::Healthy));
}

#[test]
fn growth_counts_and_old_errors_do_not() {
    let mut node = Node::new("");
    node.fast.ecc_uncorrected = Some(1000);
    for _ in 0..5 {
        assert_eq!(node.healthy("a"), None);
    }
    let died = node.fast("a", |fast| fast.ecc_uncorrected = Some(1001)).unwrap();
    assert_eq!(died.class, Class::RankDied);
    assert_eq!(died.evidence, "volatile uncorrected ECC count 1000 -> 1001");
}

#[test]
fn a_storm_of_corrected_errors_predicts_and_then_drains() {
    let mut node = Node::new("");
    let mut changes = Vec::new();
    for second in 0..700_u64 {
        let verdict = node.fast("a", |fast| fast.ecc_corrected = Some(second * 101));
        changes.extend(verdict.map(|verdict| (second, verdict.class)));
    }
    assert_eq!(changes, [(61, Class::Predict), (601, Class::Drain)]);
    let mut mild = Node::new("");
    for second in 0..700_u64 {
        assert_eq!(mild.fast("a", |fast| fast.ecc_corrected = Some(second * 99)), None);
    }
}

#[test]
fn contradictory_answers_are_debounced_and_condemn_nobody() {
    let mut node = Node::new("");
    let suspect = || Reading::Suspect { error: "NVML code 999".to_owned() };
    assert_eq!(node.read("a", suspect()), None);
    assert_eq!(node.read("a", suspect()), None);
    assert_eq!(class(node.read("a", suspect())), Some(Class::Unknown));
}

#[test]
fn a_blind_node_forgets_what_was_well_and_keeps_what_was_not() {
    let mut node = Node::new("");
    node.xid("a", 79);
    let told = node.tracker.blind(node.now, "the probe is gone");
    let told: Vec<_> = told.iter().map(|t| (t.gpu.0.as_str(), t.verdict.class)).collect();
    assert_eq!(told, [("b", Class::Unknown), ("c", Class::Unknown), ("d", Class::Unknown)]);
    assert_eq!(class(node.healthy("b")), Some(Class::Healthy));
    assert_eq!(node.class("a"), Class::Fatal);
}

#[test]
fn one_hung_gpu_is_blamed_and_a_hung_driver_is_not() {
    let mut node = Node::new("");
    let busy =
        |gpu: &str, seconds: u64| Busy { gpu: gpu.into(), call: "nvmlX".to_owned(), ms: seconds * 1000 };
    let hung = |node: &mut Node, busy: &[Busy]| {
        let (told, blind) = node.tracker.hung(node.now, busy);
        (told.into_iter().map(|t| (t.gpu.0, t.verdict.class)).collect::<Vec<_>>(), blind)
    };
    assert_eq!(hung(&mut node, &[busy("a", 2)]), (vec![], false));
    let all: Vec<Busy> = ["a", "b", "c", "d"].map(|gpu| busy(gpu, 20)).into();
    assert_eq!(hung(&mut node, &all), (vec![], true));
    assert_eq!(hung(&mut node, &[busy("a", 3)]), (vec![("a".to_owned(), Class::Unknown)], false));
    assert_eq!(hung(&mut node, &[busy("a", 15)]), (vec![("a".to_owned(), Class::Fatal)], false));
    let evidence = &node.tracker.verdict(&"a".into()).unwrap().evidence;
    assert_eq!(evidence, "nvmlX has not returned for 15 s");
    assert_eq!(node.seconds_until_change("a", 60).unwrap().1.class, Class::Healthy);
}

#[test]
fn straggling_and_heat_need_time() {
    let mut node = Node::new("");
    for hit in 1..=6 {
        let verdict = node.fast("a", |fast| fast.throttle = Some(0x48));
        assert_eq!(class(verdict), (hit == 6).then_some(Class::Drain), "{hit}");
        node.wait(MINUTE);
    }
    let mut hot = Node::new("");
    let told = (0..100).find_map(|s| hot.fast("a", |fast| fast.temperature = Some(86)).map(|v| (s, v.class)));
    assert_eq!(told, Some((60, Class::Predict)));
    // A power cap is life as usual.
    for _ in 0..100 {
        assert_eq!(hot.fast("b", |fast| fast.throttle = Some(0x4)), None);
    }
}

#[test]
fn the_gate_waits_for_links_and_rows() {
    let mut node = Node::new("");
    node.healthy("a");
    node.xid("a", 95);
    node.gone("a");
    node.gone("a");
    node.slow("a", |slow| slow.remap_pending = Some(true));
    assert_eq!(node.seconds_until_change("a", 60), None);
    assert_eq!(node.tracker.verdict(&"a".into()).unwrap().rejoin, "when no row waits to be remapped");
    let back = node.slow("a", |slow| slow.remap_pending = Some(false));
    assert_eq!(class(back), Some(Class::Predict), "once is not enough to forget it");
    assert_eq!(class(node.slow("a", |slow| slow.remap_pending = Some(false))), Some(Class::Healthy));
}

#[test]
fn a_shadow_policy_tells_and_does_nothing() {
    let mut node = Node::new("enforce = false");
    let transition = node.tracker.xid(node.now, &"a".into(), &XidSeen { number: 79, log: None }).unwrap();
    assert_eq!((transition.verdict.class, transition.enforced), (Class::Fatal, false));
    node.tracker.set_policies(Policies::built_in().unwrap());
    let fast = node.fast.clone();
    let reading = Reading::Answers { fast, slow: None, reset: false };
    let transition = node.tracker.reading(node.now, &"a".into(), &reading).unwrap();
    assert_eq!(
        (transition.verdict.class, transition.enforced),
        (Class::Fatal, true),
        "enforced from then on"
    );
}

#[test]
fn another_policy_judges_from_then_on() {
    let mut node = Node::new("");
    assert_eq!(class(node.xid("a", 94)), Some(Class::RankDied));
    let policies =
        Policies::parse("xid.94.class = \"drain\"\narch.hopper.xid.31.class = \"drain\"", "test").unwrap();
    node.tracker.set_policies(policies);
    assert_eq!(class(node.xid("b", 94)), Some(Class::Drain));
    assert_eq!(class(node.xid("c", 31)), Some(Class::Drain));
}

#[test]
fn a_flood_of_errors_hides_none_that_is_worse() {
    let mut node = Node::new("risk = { predict_at = 1e9, drain_at = 1e9 }");
    for number in 0..100_000 {
        node.xid("a", 1_000_000 + number);
    }
    assert_eq!(node.class("a"), Class::Predict);
    assert_eq!(class(node.xid("a", 79)), Some(Class::Fatal));
    let memory = serde_json::to_string(&node.tracker.memory()).unwrap();
    assert!(memory.len() < 1 << 20, "{} bytes are kept", memory.len());
}
