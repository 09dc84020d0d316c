//! Every row of the policy: its signal is made at the driver or in the kernel log, and the daemon hears the
//! class, the cause and the rejoin rule of that row, of that GPU and of no other.

#![allow(clippy::unwrap_used)]

mod harness;

use harness::{Daemon, Node, PATIENCE, RunningAgent, Session};
use reknit_proto::v1;
use reknit_simdriver::state::State;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

const CALM: Duration = Duration::from_millis(700);

/// The built-in policy with all that takes long made short. Nothing else differs, which a test proves.
const QUICK: &str = r#"
[gate]
hold = "50ms"
quiet = "400ms"
[rule.call_slow]
limit = { at_least = 0.3 }
[rule.call_hung]
limit = { at_least = 1.2 }
[rule.ecc_corrected_storm]
when = { lasting = "200ms" }
[rule.ecc_corrected_sustained]
when = { lasting = "600ms" }
[rule.nvlink_replays]
when = { windows = { bad = 3, of = 30, length = "200ms" } }
[rule.nvlink_replays_sustained]
when = { windows = { bad = 6, of = 30, length = "200ms" } }
[rule.hot]
when = { lasting = "200ms" }
[rule.nvlink_recovery_failed]
when = { windows = { bad = 2, of = 30, length = "200ms" } }
"#;

/// How a rule's signal is made.
enum Make {
    /// All at once, on a GPU.
    Set(&'static [&'static str]),
    /// First the one, and when it was read the other.
    Then(&'static [&'static str], &'static [&'static str]),
    /// A counter that grows by this much until the report comes.
    Grow(&'static str, u64),
}

/// What the report says beside the row's own words.
struct Row {
    rule: &'static str,
    make: Make,
    /// What comes before it on the way, from the same signal.
    after: &'static [&'static str],
    evidence: &'static str,
}

const fn row(rule: &'static str, make: Make, evidence: &'static str) -> Row {
    Row { rule, make, after: &[], evidence }
}

const fn grown(
    rule: &'static str,
    key: &'static str,
    by: u64,
    after: &'static [&'static str],
    evidence: &'static str,
) -> Row {
    Row { rule, make: Make::Grow(key, by), after, evidence }
}

use Make::{Set, Then};

/// Every rule but `blind` and `power_cap`, which have tests of their own.
const ROWS: &[Row] = &[
    row("gone", Set(&["lost=true"]), "NVML code 15"),
    row("gone", Set(&["absent=true"]), "NVML code 6"),
    row("reset_required", Set(&["reset_required=true"]), "NVML code 16"),
    row(
        "call_slow",
        Set(&["hangs=[\"nvmlDeviceGetTotalEccErrors\"]"]),
        "nvmlDeviceGetTotalEccErrors has not returned",
    ),
    Row { after: &["call_slow"], ..row("call_hung", Set(&["hang=true"]), "has not returned for 1 s") },
    row("suspect", Set(&["errors={\"*\":999}"]), "999"),
    row("recovery_reset", Set(&["recovery_action=reset"]), "recovery action 1"),
    row("recovery_reset", Set(&["recovery_action=bus_reset"]), "recovery action 6"),
    row("recovery_reboot", Set(&["recovery_action=reboot"]), "recovery action 2"),
    row("recovery_reboot", Set(&["recovery_action=system_reboot"]), "recovery action 7"),
    row("recovery_drain_p2p", Set(&["recovery_action=drain_p2p"]), "recovery action 3"),
    row("recovery_drain_and_reset", Set(&["recovery_action=drain_and_reset"]), "recovery action 4"),
    row("recovery_imex_domain", Set(&["recovery_action=recover_imex_domain"]), "recovery action 5"),
    row("ecc_uncorrected", Set(&["ecc_uncorrected=3"]), "volatile uncorrected ECC count 0 -> 3"),
    row("sram_threshold", Set(&["ecc_sram_threshold=true"]), "SRAM"),
    row("memory_unrepairable", Set(&["memory_unrepairable=true"]), "unrepairable"),
    grown("ecc_corrected_storm", "ecc_corrected", 1000, &[], "corrected ECC errors a second"),
    grown(
        "ecc_corrected_sustained",
        "ecc_corrected",
        1000,
        &["ecc_corrected_storm"],
        "corrected ECC errors a second",
    ),
    row("remap_pending", Set(&["remap_pending=true"]), "pending"),
    row("remap_failure", Set(&["remap_failure=true"]), "failed"),
    row("rows_remapped", Set(&["remapped_uncorrectable=1"]), "remapped rows 0 -> 1"),
    row(
        "retired_pages",
        Set(&["architecture=volta", "retired_single=60", "retired_double=3"]),
        "63 pages retired",
    ),
    row(
        "retired_double_bit",
        Set(&["architecture=volta", "retired_double=16"]),
        "16 pages retired for double-bit",
    ),
    row("nvlink_down", Set(&["nvlink_down=[4]"]), "NVLink 4 inactive"),
    grown("nvlink_replays", "nvlink_replays", 1, &[], "NVLink replays"),
    grown("nvlink_replays_sustained", "nvlink_recoveries", 1, &["nvlink_replays"], "NVLink replays"),
    grown("nvlink_crc", "nvlink_crc_errors", 1000, &[], "CRC errors a second"),
    row("nvlink_bit_errors", Set(&["nvlink_version=5", "nvlink_ber=2e-12"]), "2e-12"),
    grown("nvlink_recovery_failed", "nvlink_recovery_failures", 1, &[], "failed NVLink recoveries"),
    row("fabric_route", Set(&["fabric={\"route_unhealthy\":true}"]), "route unhealthy"),
    row("fabric_bandwidth", Set(&["fabric={\"bandwidth_degraded\":true}"]), "degraded bandwidth"),
    row("hardware_slowdown", Set(&["throttle=hw_slowdown"]), "0x8"),
    row("hardware_slowdown", Set(&["throttle=hw_thermal"]), "0x40"),
    row("hardware_slowdown", Set(&["throttle=power_brake"]), "0x80"),
    row("hot", Set(&["temperature=86"]), "86 C, slows down at 90 C"),
    row(
        "power_unreadable",
        Then(&["power_mw=110000"], &["errors={\"nvmlDeviceGetPowerUsage\":999}"]),
        "power",
    ),
    row("power_limit", Set(&["power_limit_enforced_mw=400000"]), "400000 mW in force, 700000 mW requested"),
    Row {
        rule: "pcie_replays_gen4",
        make: Make::Grow("pcie_replays", 30),
        after: &[],
        evidence: "PCIe replays in the last minute",
    },
    grown("pcie_replays_gen5", "pcie_replays", 30, &[], "PCIe replays in the last minute"),
    row("pcie_degraded", Set(&["pcie_width=8", "utilization=90"]), "Gen5 x8 of Gen5 x16 under load"),
];

/// What the built-in policy says of a row.
fn built_in() -> Vec<Value> {
    let out = Command::new(env!("CARGO_BIN_EXE_reknit-agent"))
        .args(["policy", "explain", "--format", "json"])
        .env_remove("REKNIT_POLICY")
        .output()
        .unwrap();
    assert!(out.status.success());
    serde_json::from_slice::<Vec<Value>>(&out.stdout).unwrap()
}

fn text<'a>(row: &'a Value, key: &str) -> &'a str {
    row[key].as_str().unwrap()
}

fn class_of(name: &str) -> v1::HealthClass {
    match name {
        "fatal" => v1::HealthClass::Fatal,
        "rank_died" => v1::HealthClass::RankDied,
        "drain" => v1::HealthClass::Drain,
        "predict" => v1::HealthClass::Predict,
        "unknown" => v1::HealthClass::Unknown,
        other => panic!("{other} is not reported"),
    }
}

fn set(node: &Node, gpu: usize, changes: &[&str]) {
    let changes: Vec<String> = changes.iter().map(|&change| change.to_owned()).collect();
    State::update(&node.driver(), |state| state.set(gpu, &changes)).unwrap();
}

fn grow(node: &Node, gpu: usize, key: &str, by: u64) {
    let value = serde_json::to_value(&State::load(&node.driver()).unwrap().gpus[gpu]).unwrap();
    let now = value[key].as_u64().unwrap();
    set(node, gpu, &[&format!("{key}={}", now + by)]);
}

struct Lab {
    node: Node,
    agent: RunningAgent,
    session: Session,
    _daemon: Daemon,
}

impl Lab {
    /// An agent over `gpus` healthy GPUs that reads them every 50 ms.
    async fn start(gpus: usize, policy: &str) -> Self {
        let (mut daemon, node) = (Daemon::start().await, Node::new(gpus));
        let file = node.folder.path().join("policy.toml");
        fs::write(&file, policy).unwrap();
        let log = fs::File::create(node.folder.path().join("log")).unwrap();
        let mut command = node.command(&format!("http://{}", daemon.address));
        command.arg("--policy").arg(file);
        command.args(["--probe-interval-ms", "50"]).stderr(log);
        let agent = RunningAgent(command.spawn().unwrap());
        let mut session = daemon.session().await;
        session.quiet(CALM).await;
        Self { node, agent, session, _daemon: daemon }
    }

    async fn report(&mut self, gpu: usize, before: &[usize]) -> v1::HealthTransition {
        next_of(&mut self.session, &self.node.gpus, gpu, before).await
    }

    async fn logged(&self, words: &str) {
        let log = self.node.folder.path().join("log");
        let deadline = Instant::now() + PATIENCE;
        while !fs::read_to_string(&log).unwrap().contains(words) {
            assert!(Instant::now() < deadline, "the agent never said `{words}`");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

fn expect(report: &v1::HealthTransition, row: &Value, evidence: &str) {
    let name = text(row, "row");
    assert_eq!(report.health(), class_of(text(row, "class")), "{name}: {report:?}");
    let words = text(row, "cause");
    assert!(report.verdict().cause.ends_with(words), "{name}: {report:?}");
    assert_eq!(report.verdict().action, text(row, "action"), "{name}");
    let rejoin = text(row, "rejoin_words").split(", then").next().unwrap();
    assert!(report.verdict().rejoin.starts_with(rejoin), "{name}: {report:?}");
    let readable = row["shards_readable"].as_bool().unwrap_or(text(row, "class") != "fatal");
    assert_eq!(report.verdict().shards_readable, readable, "{name}: {report:?}");
    assert!(report.verdict().evidence.contains(evidence), "{name}: {report:?}");
}

/// What each row must say, written down apart from the policy: class and rejoin rule.
const MEANINGS: &str = "
    fatal clear: gone reset_required call_hung recovery_reset recovery_reboot nvlink_down fabric_route
    unknown clear: call_slow suspect blind
    drain clear: recovery_drain_p2p recovery_drain_and_reset recovery_imex_domain ecc_corrected_sustained
    drain clear: nvlink_replays_sustained nvlink_crc nvlink_bit_errors fabric_bandwidth hardware_slowdown pcie_degraded
    drain reset: nvlink_recovery_failed
    drain operator: sram_threshold memory_unrepairable remap_failure retired_pages retired_double_bit
    rank_died at_once: ecc_uncorrected
    predict quiet: ecc_corrected_storm rows_remapped nvlink_replays pcie_replays_gen4 pcie_replays_gen5
    predict clear: remap_pending hot power_unreadable power_limit
    ignore clear: power_cap
    fatal reset: 79 167 46 62 95 110 119 120 140 143 158 169 150
    rank_died at_once: 48 171 172 94 109
    drain reset: 64 136 155 156 74
    drain operator: 61 54 168 78 142 151 173
    predict quiet: 144 145 146 147 148 149 63 92 93 121 160 161 157 163 164 165 unknown
    ignore at_once: 13 31 43 45 8 11 25 32 37 38 39 40 41 44 68 69 80 137 154
";

#[test]
fn each_row_means_what_was_agreed() {
    let rows = built_in();
    let mut agreed = BTreeSet::new();
    for line in MEANINGS.lines().filter(|line| !line.trim().is_empty()) {
        let (meaning, names) = line.trim().split_once(':').unwrap();
        for name in names.split_whitespace() {
            let is_xid = name == "unknown" || name.parse::<u64>().is_ok();
            agreed.insert(format!("{}.{name}: {meaning}", if is_xid { "xid" } else { "rule" }));
        }
    }
    let said = rows
        .iter()
        .map(|row| format!("{}: {} {}", text(row, "row"), text(row, "class"), text(row, "rejoin")));
    let said: BTreeSet<String> = said.collect();
    assert_eq!(said.symmetric_difference(&agreed).collect::<Vec<_>>(), Vec::<&String>::new());
}

#[test]
fn the_quick_policy_differs_in_nothing_but_time() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("policy.toml");
    fs::write(&file, QUICK).unwrap();
    let out = Command::new(env!("CARGO_BIN_EXE_reknit-agent"))
        .args(["policy", "check", "--format", "json"])
        .arg(&file)
        .output()
        .unwrap();
    let answer: Value = serde_json::from_slice(&out.stdout).unwrap();
    for change in answer["differs"].as_array().unwrap() {
        let change = change.as_str().unwrap();
        let key = change.split(':').next().unwrap();
        let hung = ["rule.call_slow.limit", "rule.call_hung.limit"].contains(&key);
        assert!(hung || key.ends_with(".when") || key.starts_with("gate."), "{change}");
    }
}

#[tokio::test]
async fn each_rule_reports_its_signal_and_blames_nobody_else() {
    let rows = built_in();
    let of = |rule: &str| rows.iter().find(|row| row["row"] == format!("rule.{rule}")).unwrap();
    let tested: BTreeSet<String> = ROWS.iter().map(|row| format!("rule.{}", row.rule)).collect();
    let all = rows.iter().map(|row| text(row, "row").to_owned()).filter(|row| row.starts_with("rule."));
    let untested: Vec<_> = all.filter(|row| !tested.contains(row)).collect();
    assert_eq!(untested, ["rule.blind", "rule.power_cap"]);

    let mut lab = Lab::start(ROWS.len(), QUICK).await;
    // Some GPUs are of an older kind before anything happens to them.
    let mut before = Vec::new();
    for (gpu, row) in ROWS.iter().enumerate() {
        if row.rule == "pcie_replays_gen4" {
            set(&lab.node, gpu, &["pcie_gen=4", "pcie_gen_max=4"]);
        }
    }
    for (gpu, row) in ROWS.iter().enumerate() {
        println!("{} on GPU {gpu}", row.rule);
        let expected = of(row.rule);
        let mut ahead = row.after.iter();
        match row.make {
            Set(changes) => set(&lab.node, gpu, changes),
            Then(first, then) => {
                set(&lab.node, gpu, first);
                tokio::time::sleep(Duration::from_millis(100)).await;
                set(&lab.node, gpu, then);
            }
            Make::Grow(key, by) => grow(&lab.node, gpu, key, by),
        }
        let told = loop {
            let growing = async {
                loop {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                    if let Make::Grow(key, by) = row.make {
                        grow(&lab.node, gpu, key, by);
                    }
                }
            };
            // The next report, while the counter grows.
            let report = tokio::select! {
                report = next_of(&mut lab.session, &lab.node.gpus, gpu, &before) => report,
                () = growing => unreachable!("it goes on for ever"),
            };
            match ahead.next() {
                Some(rule) => expect(&report, of(rule), ""),
                None => break report,
            }
        };
        expect(&told, expected, row.evidence);
        if let Set([change, ..]) | Then(_, [change, ..]) = row.make {
            let key = change.split('=').next().unwrap();
            let gpus = State::load(&lab.node.driver()).unwrap().gpus;
            let of = |gpu: usize| serde_json::to_value(&gpus[gpu]).unwrap()[key].clone();
            assert_ne!(of(gpu), of(ROWS.len() - 1 - usize::from(gpu == ROWS.len() - 1)), "{change} was made");
        }
        // So that its calls return when the agent ends.
        if row.rule.starts_with("call") {
            set(&lab.node, gpu, &["hang=false", "hangs=[]"]);
        }
        before.push(gpu);
    }
    drop(lab.agent);
}

/// The next report of `gpu`. Of those in `before` what they go through on their way back may be heard.
async fn next_of(
    session: &mut Session,
    gpus: &[String],
    gpu: usize,
    before: &[usize],
) -> v1::HealthTransition {
    loop {
        let (report, _) = session.health().await;
        let from = gpus.iter().position(|uuid| *uuid == report.gpu).unwrap();
        if from == gpu {
            return report;
        }
        assert!(before.contains(&from), "GPU {from} is blamed for GPU {gpu}: {report:?}");
    }
}

#[tokio::test]
async fn a_power_cap_is_life_as_usual() {
    let mut lab = Lab::start(2, QUICK).await;
    set(&lab.node, 1, &["throttle=sw_power_cap"]);
    lab.session.quiet(CALM).await;
    let out = Command::new(env!("CARGO_BIN_EXE_reknit-agent"))
        .args(["check", "--for", "1s", "--format", "json", "--nvml-library"])
        .arg(harness::library())
        .arg("--kmsg")
        .arg(lab.node.folder.path().join("kmsg"))
        .env("REKNIT_SIMDRIVER_STATE", lab.node.driver())
        .output()
        .unwrap();
    let seen: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(
        (seen["gpus"][0]["class"].as_str(), seen["gpus"][1]["class"].as_str()),
        (Some("healthy"), Some("ignore"))
    );
    assert!(text(&seen["gpus"][1], "evidence").contains("0x4"));
    assert_eq!(out.status.code(), Some(0));
}

/// Raises every XID of the policy, each on a GPU of its own, and hears of each what its row says.
async fn each_xid(by: impl Fn(&Lab, usize, u64), evidence: &str, told: &str) {
    let rows = built_in();
    let number =
        |row: &Value| text(row, "row").strip_prefix("xid.").and_then(|number| number.parse::<u64>().ok());
    let mut rows: Vec<(u64, &Value)> = rows.iter().filter_map(|row| Some((number(row)?, row))).collect();
    assert_eq!(rows.len(), 65);
    let unknown = built_in().into_iter().find(|row| row["row"] == "xid.unknown").unwrap();
    rows.push((4711, &unknown));
    let mut lab = Lab::start(rows.len(), QUICK).await;
    let mut before = Vec::new();
    for (gpu, (number, row)) in rows.iter().enumerate() {
        by(&lab, gpu, *number);
        lab.logged(&format!("{told} gpu={} xid={number}", lab.node.gpus[gpu])).await;
        if text(row, "class") != "ignore" {
            let report = lab.report(gpu, &before).await;
            expect(&report, row, evidence);
            assert!(report.verdict().cause.starts_with(&format!("XID {number}: ")), "{report:?}");
        }
        before.push(gpu);
    }
    // Nothing comes late of those that say nothing.
    while let Some((report, _)) = lab.session.next(CALM).await {
        let v1::agent_report::Report::Health(report) = report else {
            panic!("{report:?} is no health transition");
        };
        let from = lab.node.gpus.iter().position(|uuid| *uuid == report.gpu).unwrap();
        assert_ne!(text(rows[from].1, "class"), "ignore", "{report:?}");
    }
    drop(lab.agent);
}

#[tokio::test]
async fn each_xid_that_nvml_tells() {
    each_xid(|lab, gpu, xid| lab.node.xid(gpu, xid), "XID ", "XID").await;
}

#[tokio::test]
async fn each_xid_that_only_the_kernel_log_tells() {
    let write = |lab: &Lab, gpu: usize, xid: u64| {
        let state = State::load(&lab.node.driver()).unwrap();
        state
            .log_xid(gpu, xid, Some("RLW_CTRL XC0 i0 Link 04"), &lab.node.folder.path().join("kmsg"))
            .unwrap();
    };
    each_xid(write, "kernel log: Xid ", "XID in the kernel log").await;
}
