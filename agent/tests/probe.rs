//! The probe itself, spoken to over its socket as the supervisor does, over the simulated driver.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod harness;

use harness::{Node, PATIENCE, kill, library, runs};
use reknit_simdriver::state::{STATE_VARIABLE, SetterCall, State, Target};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// A running probe and what it says.
struct Probe {
    child: Child,
    socket: UnixStream,
    lines: Receiver<Value>,
}

impl Probe {
    /// Ready, with nothing else read of it.
    fn start(node: &Node, interval_ms: u64) -> Self {
        let probe = Self::spawn(node, interval_ms);
        let ready = probe.wait_for("ready", |line| line.get("ready").cloned());
        assert_eq!(ready["gpus"].as_array().unwrap().len(), node.gpus.len());
        probe
    }

    fn spawn(node: &Node, interval_ms: u64) -> Self {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_reknit-agent"))
            .args(["probe", "--log", "human", "--interval-ms", &interval_ms.to_string(), "--nvml-library"])
            .arg(library())
            .env(STATE_VARIABLE, node.driver())
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let socket = UnixStream::from(ours);
        let input = BufReader::new(socket.try_clone().unwrap());
        let (lines_in, lines) = channel();
        std::thread::spawn(move || {
            for line in input.lines().map_while(Result::ok) {
                if lines_in.send(serde_json::from_str(&line).unwrap()).is_err() {
                    return;
                }
            }
        });
        let mut probe = Self { child, socket, lines };
        probe.order(json!({"expect": {"gpus": []}}));
        probe
    }

    fn order(&mut self, order: Value) {
        self.socket.write_all(format!("{order}\n").as_bytes()).unwrap();
    }

    fn set_power_limit(&mut self, gpu: &str, limit: Option<u32>) {
        self.order(json!({"set_power_limit": {"gpu": gpu, "limit": limit}}));
    }

    /// The first line of which `pick` makes something.
    fn wait_for<T>(&self, what: &str, pick: impl Fn(&Value) -> Option<T>) -> T {
        self.within(PATIENCE, pick).unwrap_or_else(|| panic!("no {what} within {PATIENCE:?}"))
    }

    fn within<T>(&self, limit: Duration, pick: impl Fn(&Value) -> Option<T>) -> Option<T> {
        let deadline = Instant::now() + limit;
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    if let Some(picked) = pick(&line) {
                        return Some(picked);
                    }
                }
                Err(RecvTimeoutError::Timeout) => return None,
                Err(RecvTimeoutError::Disconnected) => panic!("the probe is gone"),
            }
        }
    }

    /// The next reading of `gpu`.
    fn reading(&self, gpu: &str) -> Value {
        self.wait_for("reading", |line| reading_of(line, gpu))
    }

    fn power_limit(&self) -> Value {
        self.wait_for("power limit", |line| line.get("power_limit").cloned())
    }

    /// Everything that is said from now on for `time`.
    fn all(&self, time: Duration) -> Vec<Value> {
        let all = std::cell::RefCell::new(Vec::new());
        let _over = self.within(time, |line| {
            all.borrow_mut().push(line.clone());
            None::<()>
        });
        all.into_inner()
    }

    /// Clock ticks, of which there are 100 a second.
    fn cpu_ticks(&self) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        let (_, after_name) = stat.rsplit_once(')').unwrap();
        let fields: Vec<&str> = after_name.split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    }

    /// Waits for the probe's end.
    fn ended(&mut self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        while Instant::now() < deadline {
            if self.child.try_wait().unwrap().is_some() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        let _gone_already = self.child.kill();
        let _exit = self.child.wait();
    }
}

fn reading_of(line: &Value, gpu: &str) -> Option<Value> {
    let reading = line.get("reading").filter(|reading| reading["gpu"] == gpu)?;
    Some(reading["reading"].clone())
}

fn set_node(node: &Node, change: &str) {
    State::update(&node.driver(), |s| s.set(Target::Node, &[change.to_owned()])).unwrap();
}

/// A reading that was begun after the change.
fn fresh(probe: &mut Probe, gpu: &str) -> Value {
    probe.all(Duration::from_millis(60));
    probe.order(json!("read_now"));
    probe.wait_for("reading of both sets", |line| {
        reading_of(line, gpu).filter(|reading| !reading["answers"]["slow"].is_null())
    })["answers"]
        .clone()
}

#[test]
fn everything_that_nvml_tells_is_read() {
    let node = Node::new(2);
    let mut probe = Probe::start(&node, 20);
    for change in [
        "recovery_action=4",
        "ecc_uncorrected=3",
        "ecc_corrected=70000",
        "nvlink_down=[2,17]",
        "throttle=[\"hw_thermal\",\"power_brake\"]",
        "temperature=71",
        "slowdown_temperature=88",
        "power_mw=654321",
        "utilization=93",
        "ecc_sram_threshold=true",
        "memory_unrepairable=true",
        "remap_pending=true",
        "remapped_correctable=4",
        "remapped_uncorrectable=5",
        "retired_single=6",
        "retired_double=7",
        "retired_pending=true",
        "nvlink_replays=8",
        "nvlink_recoveries=9",
        "nvlink_crc_errors=10",
        "fabric_route_unhealthy=true",
        "power_limit_mw=600000",
        "power_limit_enforced_mw=450000",
        "memory_temperature=83",
        "pcie_replays=11",
        "pcie_gen=3",
        "pcie_width=8",
    ] {
        node.set(0, change);
    }
    let read = fresh(&mut probe, &node.gpus[0]);
    let expected = json!({
        "recovery_action": 4,
        "ecc_uncorrected": 3,
        "ecc_corrected": 70000,
        "links_active": (1_u32 << 18) - 1 - (1 << 2) - (1 << 17),
        "throttle": 0xc0,
        "temperature": 71,
        "slowdown_temperature": 88,
        "power_mw": 654_321,
        "power_unreadable": false,
        "utilization": 93,
    });
    assert_eq!(read["fast"], expected);
    let expected = json!({
        "ecc_sram_threshold": true,
        "memory_unrepairable": true,
        "remap_pending": true,
        "remap_failure": false,
        "remapped_rows": 9,
        "retired_single": 6,
        "retired_double": 7,
        "retired_pending": true,
        "link_replays": 8,
        "link_recoveries": 9,
        "link_crc_errors": 10,
        "link_ber": 0.0,
        "link_recovery_failures": 0,
        "fabric_route_unhealthy": true,
        "fabric_bandwidth_degraded": false,
        "power_limit_mw": 600_000,
        "power_limit_enforced_mw": 450_000,
        "memory_temperature": 83,
        "pcie_replays": 11,
        "pcie_gen": 3,
        "pcie_gen_max": 5,
        "pcie_width": 8,
        "pcie_width_max": 16,
    });
    assert_eq!(read["slow"], expected);
    // The other GPU is another GPU.
    let other = fresh(&mut probe, &node.gpus[1]);
    assert_eq!(other["fast"]["ecc_uncorrected"], 0);
    assert_eq!(other["fast"]["links_active"], (1_u32 << 18) - 1);
    assert_eq!(other["slow"]["retired_single"], Value::Null, "it retires no pages");
    assert_eq!(other["slow"]["fabric_route_unhealthy"], Value::Null, "it has no fabric");
}

#[test]
fn nvlink_5_tells_rates_and_recoveries() {
    let node = Node::new(1);
    for change in
        ["nvlink_version=5", "nvlink_ber=3e-11", "nvlink_recovery_failures=2", "nvlink_recoveries=7"]
    {
        node.set(0, change);
    }
    let mut probe = Probe::start(&node, 20);
    let slow = fresh(&mut probe, &node.gpus[0])["slow"].clone();
    let rate = slow["link_ber"].as_f64().unwrap();
    assert!((rate - 3e-11).abs() < 1e-15, "{rate}");
    assert_eq!(slow["link_recovery_failures"], 2);
    assert_eq!(slow["link_recoveries"], 7);
}

#[test]
fn the_slow_set_comes_with_every_tenth_reading() {
    let node = Node::new(1);
    let probe = Probe::start(&node, 25);
    let slow = |_| !probe.reading(&node.gpus[0])["answers"]["slow"].is_null();
    let with_slow: Vec<bool> = (0..30).map(slow).collect();
    let first = with_slow.iter().position(|slow| *slow).unwrap();
    let places: Vec<usize> = (0..30).filter(|place| with_slow[*place]).collect();
    assert_eq!(places, [first, first + 10, first + 20]);
}

#[test]
fn a_code_means_the_same_from_any_call() {
    let node = Node::new(1);
    let gpu = &node.gpus[0];
    let probe = Probe::start(&node, 20);
    for call in [
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetPcieReplayCounter",
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetGpuFabricInfoV",
    ] {
        for (code, reading) in
            [(15, "gone"), (28, "gone"), (16, "reset_required"), (9, "blind"), (999, "suspect")]
        {
            if (call, code) == ("nvmlDeviceGetPowerUsage", 999) {
                continue;
            }
            // The driver that is away ends the probe after some readings: no more than one is waited for.
            node.set(0, &format!("errors={{\"{call}\":{code}}}"));
            let read = probe.wait_for(&format!("{reading} from {call}"), |line| {
                reading_of(line, gpu).filter(|read| read.get(reading).is_some() || *read == reading)
            });
            node.set(0, "errors={}");
            if let Some(error) = read.get(reading).and_then(|read| read["error"].as_str()) {
                assert!(error.starts_with(&format!("NVML code {code} from {call}: ")), "{error}");
            }
            probe.wait_for("answer", |line| reading_of(line, gpu)?.get("answers").cloned());
        }
    }
}

#[test]
fn a_power_sensor_that_fails_is_told_and_the_rest_is_read() {
    let node = Node::new(1);
    let probe = Probe::start(&node, 20);
    assert_eq!(probe.reading(&node.gpus[0])["answers"]["fast"]["power_unreadable"], false);
    node.set(0, "errors={\"nvmlDeviceGetPowerUsage\":999}");
    let fast = probe.wait_for("unreadable power", |line| {
        let fast = reading_of(line, &node.gpus[0])?["answers"]["fast"].clone();
        (fast["power_unreadable"] == true).then_some(fast)
    });
    assert_eq!((&fast["power_mw"], &fast["temperature"]), (&Value::Null, &json!(40)));
}

#[test]
fn one_hung_call_is_named_and_hides_no_other_gpu() {
    let node = Node::new(3);
    let mut probe = Probe::start(&node, 20);
    node.set(1, "hangs=[\"nvmlDeviceGetPcieReplayCounter\"]");
    probe.order(json!("read_now"));
    let busy = probe.wait_for("busy call", |line| {
        line["tick"]["busy"].as_array()?.iter().find(|busy| busy["ms"].as_u64() > Some(300)).cloned()
    });
    assert_eq!(
        (&busy["gpu"], &busy["call"]),
        (&json!(node.gpus[1]), &json!("nvmlDeviceGetPcieReplayCounter"))
    );
    let said = probe.all(Duration::from_millis(500));
    let readings = |gpu: &str| said.iter().filter(|line| reading_of(line, gpu).is_some()).count();
    assert!(readings(&node.gpus[0]) > 10 && readings(&node.gpus[2]) > 10);
    assert_eq!(readings(&node.gpus[1]), 0);
    // The hung GPU's orders wait; another's do not.
    probe.set_power_limit(&node.gpus[1], Some(300_000));
    probe.set_power_limit(&node.gpus[2], Some(400_000));
    assert_eq!(probe.power_limit(), json!({"gpu": node.gpus[2], "set": {"Ok": 400_000}}));
    node.set(1, "hangs=[]");
    assert_eq!(probe.power_limit(), json!({"gpu": node.gpus[1], "set": {"Ok": 300_000}}));
    assert!(probe.reading(&node.gpus[1]).get("answers").is_some());
    probe.wait_for("calm", |line| (line["tick"]["busy"] == json!([])).then_some(()));
}

#[test]
fn a_driver_that_hangs_as_a_whole_silences_no_tick_and_no_refusal() {
    let node = Node::new(2);
    let mut probe = Probe::start(&node, 20);
    set_node(&node, "hang=true");
    probe.wait_for("both busy", |line| {
        let busy = line["tick"]["busy"].as_array()?;
        (busy.len() == 2 && busy.iter().all(|busy| busy["ms"].as_u64() > Some(300))).then_some(())
    });
    for _ in 0..40 {
        probe.set_power_limit(&node.gpus[0], Some(300_000));
    }
    let refused = probe.power_limit()["set"]["Err"].as_str().unwrap().to_owned();
    assert!(refused.contains("hangs in nvml"), "{refused}");
    // Told to end, it ends: nothing waits for the driver.
    kill(probe.child.id(), "TERM");
    assert!(probe.ended(Duration::from_secs(1)));
}

#[test]
fn a_wait_for_events_that_never_returns_is_found_out() {
    let node = Node::new(1);
    let probe = Probe::start(&node, 100);
    node.set(0, "hangs=[\"nvmlEventSetWait_v2\"]");
    let began = Instant::now();
    let call = probe.wait_for("busy wait", |line| {
        // Others are on their way for a moment.
        let hung = line["tick"]["busy"].as_array()?.iter().find(|busy| busy["ms"].as_u64() > Some(1000))?;
        Some(hung["call"].clone())
    });
    assert_eq!(call, "nvmlEventSetWait_v2");
    assert!(began.elapsed() > Duration::from_secs(4), "a wait may take its time");
}

#[test]
fn a_power_limit_is_clamped_set_and_answered() {
    let node = Node::new(2);
    let gpu = node.gpus[1].clone();
    let mut probe = Probe::start(&node, 20);
    for (wanted, limit) in
        [(Some(500_000), 500_000), (Some(1), 200_000), (Some(9_000_000), 700_000), (None, 700_000)]
    {
        probe.set_power_limit(&gpu, wanted);
        assert_eq!(probe.power_limit(), json!({"gpu": gpu, "set": {"Ok": limit}}));
    }
    let calls = SetterCall::read_all(&node.driver()).unwrap();
    let made: Vec<_> = calls.iter().map(|call| (call.call.as_str(), call.gpu, call.value)).collect();
    let set = "nvmlDeviceSetPowerManagementLimit";
    assert_eq!(made, [(set, 1, 500_000), (set, 1, 200_000), (set, 1, 700_000), (set, 1, 700_000)]);

    node.set(1, "errors={\"nvmlDeviceSetPowerManagementLimit\":4}");
    probe.set_power_limit(&gpu, Some(300_000));
    let refused = probe.power_limit()["set"]["Err"].as_str().unwrap().to_owned();
    assert!(refused.contains("NVML code 4") && refused.contains("as root"), "{refused}");
    probe.set_power_limit("GPU-nowhere", None);
    assert!(probe.power_limit()["set"].get("Err").is_some());
    assert!(probe.reading(&gpu).get("answers").is_some());
}

#[test]
fn a_stale_handle_is_resolved_again_and_means_a_reset() {
    let node = Node::new(2);
    let probe = Probe::start(&node, 20);
    let reset = |reading: &Value| reading["answers"]["reset"] == true;
    assert!(!reset(&probe.reading(&node.gpus[0])));
    node.set(0, "generation=1");
    let read = probe.wait_for("reset", |line| reading_of(line, &node.gpus[0]).filter(reset));
    assert!(!read["answers"]["slow"].is_null(), "all is read anew: {read}");
    let said = probe.all(Duration::from_millis(300));
    assert!(said.iter().all(|line| reading_of(line, &node.gpus[0]).is_none_or(|read| !reset(&read))));
    assert!(said.iter().all(|line| reading_of(line, &node.gpus[1]).is_none_or(|read| !reset(&read))));
}

#[test]
fn garbage_is_passed_over_and_the_socket_s_end_ends_it() {
    let node = Node::new(1);
    let mut probe = Probe::start(&node, 60_000);
    probe.reading(&node.gpus[0]);
    probe.socket.write_all(b"\xff\xfe{{{\n\n{\"dance\":1}\n[]\n\"read_now\"\n").unwrap();
    probe.reading(&node.gpus[0]);
    set_node(&node, "hang=true");
    probe.order(json!("read_now"));
    probe.wait_for("hung call", |line| {
        line["tick"]["busy"].as_array()?.iter().find(|busy| busy["ms"].as_u64() > Some(200)).cloned()
    });
    probe.socket.shutdown(Shutdown::Write).unwrap();
    assert!(probe.ended(Duration::from_secs(1)), "it outlives its supervisor");

    let mut probe = Probe::spawn(&Node::new(1), 20);
    let pid = probe.child.id();
    // A line without end.
    let endless = [b'x'; 1 << 16];
    while probe.socket.write_all(&endless).is_ok() {}
    assert!(probe.ended(PATIENCE) && !runs(pid));
}

#[test]
fn a_storm_of_failing_waits_does_not_spin() {
    let node = Node::new(4);
    let probe = Probe::start(&node, 1000);
    set_node(&node, "wait_error=999");
    let gaps: Vec<Value> = (0..4).map(|_| probe.wait_for("gap", |line| line.get("gap").cloned())).collect();
    for gap in &gaps {
        let what = gap["what"].as_str().unwrap();
        assert!(what.starts_with("XID events: NVML code 999 from nvmlEventSetWait_v2"), "{what}");
    }
    let before = probe.cpu_ticks();
    let said = probe.all(Duration::from_secs(2));
    let used = probe.cpu_ticks() - before;
    println!("{used} ticks of CPU time in 2 s");
    assert!(used <= 10, "{used} ticks in 2 s");
    assert!(said.iter().all(|line| line.get("gap").is_none()), "said once each");
    set_node(&node, "wait_error=null");
    hears_xids_again(&node, &probe);
}

/// Raises XIDs until one is heard: those from before the GPU's events were registered are lost.
fn hears_xids_again(node: &Node, probe: &Probe) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        assert!(Instant::now() < deadline, "no XID is heard any more");
        node.xid(0, 31);
        if let Some(xid) = probe.within(Duration::from_millis(100), |line| line.get("xid").cloned()) {
            assert_eq!(xid, json!({"gpu": node.gpus[0], "xid": 31}));
            return;
        }
    }
}

#[test]
fn events_that_cannot_be_had_at_first_are_asked_for_again() {
    let node = Node::new(1);
    node.set(0, "errors={\"nvmlDeviceRegisterEvents\":999}");
    let probe = Probe::start(&node, 20);
    let gap = probe.wait_for("gap", |line| line.get("gap").cloned());
    let what = gap["what"].as_str().unwrap();
    assert!(what.starts_with("XID events: NVML code 999 from nvmlDeviceRegisterEvents"), "{what}");
    assert!(probe.reading(&node.gpus[0]).get("answers").is_some());
    node.set(0, "errors={}");
    hears_xids_again(&node, &probe);
}

#[test]
fn a_gpu_that_comes_back_is_heard_again_at_once() {
    let node = Node::new(1);
    let probe = Probe::start(&node, 20);
    node.set(0, "lost=true");
    probe.wait_for("loss", |line| reading_of(line, &node.gpus[0])?.get("gone").cloned());
    // Long enough for the listener to wait a second between its tries.
    probe.all(Duration::from_secs(2));
    node.set(0, "lost=false");
    probe.wait_for("answer", |line| reading_of(line, &node.gpus[0])?.get("answers").cloned());
    let back = Instant::now();
    hears_xids_again(&node, &probe);
    println!("heard {:?} after it came back", back.elapsed());
    assert!(back.elapsed() < Duration::from_millis(400), "{:?}", back.elapsed());
}

#[test]
fn what_only_root_may_ask_is_a_gap_said_once() {
    let node = Node::new(2);
    node.set(0, "errors={\"nvmlDeviceGetSramEccErrorStatus\":4,\"nvmlDeviceRegisterEvents\":4}");
    let mut probe = Probe::start(&node, 20);
    let mut gaps: Vec<(Value, String)> = (0..2)
        .map(|_| probe.wait_for("gap", |line| line.get("gap").cloned()))
        .map(|gap| (gap["gpu"].clone(), gap["what"].as_str().unwrap().to_owned()))
        .collect();
    gaps.sort_by(|a, b| a.1.cmp(&b.1));
    assert!(gaps.iter().all(|(gpu, _)| *gpu == node.gpus[0]));
    assert!(gaps[0].1.starts_with("XID events: NVML code 4 from nvmlDeviceRegisterEvents"), "{gaps:?}");
    assert!(gaps[1].1.starts_with("nvmlDeviceGetSramEccErrorStatus: NVML answers NoPermission"), "{gaps:?}");
    let read = fresh(&mut probe, &node.gpus[0]);
    assert_eq!(read["slow"]["ecc_sram_threshold"], Value::Null);
    assert_eq!(read["slow"]["memory_unrepairable"], false);
    assert!(probe.all(Duration::from_millis(500)).iter().all(|line| line.get("gap").is_none()));
}

#[test]
fn a_gpu_that_comes_later_is_watched_too() {
    let node = Node::new(3);
    node.set(0, "absent=true");
    node.set(1, "hang=true");
    let mut probe = Probe::spawn(&node, 20);
    let names = |line: &Value| -> Option<Vec<(Value, Value)>> {
        let gpus = line.get("ready")?["gpus"].as_array()?;
        Some(gpus.iter().map(|gpu| (gpu["uuid"].clone(), gpu["index"].clone())).collect())
    };
    let third = (json!(node.gpus[2]), json!(1));
    assert_eq!(probe.wait_for("ready", names), [third.clone()]);
    assert!(probe.reading(&node.gpus[2]).get("answers").is_some());
    node.set(1, "hang=false");
    let second = (json!(node.gpus[1]), json!(0));
    assert_eq!(probe.wait_for("ready", names), [third.clone(), second.clone()]);
    assert!(probe.reading(&node.gpus[1]).get("answers").is_some());
    node.set(0, "absent=false");
    // The places of before are taken.
    let first = (json!(node.gpus[0]), json!(2));
    assert_eq!(probe.wait_for("ready", names), [third, second, first]);
    assert!(probe.reading(&node.gpus[0]).get("answers").is_some());
    probe.set_power_limit(&node.gpus[0], Some(400_000));
    assert_eq!(probe.power_limit(), json!({"gpu": node.gpus[0], "set": {"Ok": 400_000}}));
}

#[test]
fn an_event_has_both_sets_read_at_once() {
    let node = Node::new(2);
    let probe = Probe::start(&node, 60_000);
    for _ in &node.gpus {
        probe.wait_for("first reading", |line| line.get("reading").cloned());
    }
    let began = Instant::now();
    State::update(&node.driver(), |s| s.raise_recovery_action(1)).unwrap();
    let read = probe.reading(&node.gpus[1]);
    assert!(began.elapsed() < Duration::from_millis(200), "{:?}", began.elapsed());
    assert!(!read["answers"]["slow"].is_null());
    assert_eq!(probe.within(Duration::from_millis(300), |line| reading_of(line, &node.gpus[0])), None);
}
