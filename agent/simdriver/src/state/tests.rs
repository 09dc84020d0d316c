use super::*;

#[test]
fn uuids_differ_by_node_and_index_and_never_change() {
    let a = State::healthy("a", 8);
    let b = State::healthy("b", 8);
    let mut uuids: Vec<_> = a.gpus.iter().chain(&b.gpus).map(|g| &g.uuid).collect();
    uuids.sort();
    uuids.dedup();
    assert_eq!(uuids.len(), 16);
    assert_eq!(a, State::healthy("a", 8));
    assert_eq!(a.gpus[0].uuid.len(), "GPU-".len() + 36);
}

#[test]
fn set_refuses_what_it_does_not_know() {
    let mut state = State::healthy("a", 2);
    let before = state.clone();
    let refused = |state: &mut State, gpu, text: &str| {
        let e = state.set(gpu, &["lost=true".to_owned(), text.to_owned()]);
        e.expect_err(text).to_string()
    };
    assert!(refused(&mut state, 0, "colour=red").contains("unknown key `colour`"));
    assert!(refused(&mut state, 0, "uuid=x").contains("unknown key `uuid`"));
    assert!(refused(&mut state, 0, "temperature=warm").contains("no value for"));
    assert!(refused(&mut state, 0, "temperature=-1").contains("no value for"));
    assert!(refused(&mut state, 0, "lost").contains("KEY=VALUE"));
    assert!(refused(&mut state, 2, "lost=true").contains("no GPU 2"));
    assert_eq!(state, before, "a refused change changes nothing");
    state.set(1, &["lost=true".to_owned(), "temperature=91".to_owned()]).unwrap();
    assert!(state.gpus[1].lost && state.gpus[1].temperature == 91 && !state.gpus[0].lost);
}

#[test]
fn an_unknown_key_in_the_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.json");
    let state = State::healthy("a", 1);
    state.save(&path).unwrap();
    assert_eq!(State::load(&path).unwrap(), state);
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replacen("\"lost\"", "\"lots\"", 1)).unwrap();
    assert!(matches!(State::load(&path), Err(StateError::Content { .. })));
}

#[test]
fn writers_at_the_same_time_lose_no_event() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.json");
    State::healthy("a", 1).save(&path).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for xid in 0..25 {
                    State::update(&path, |state| state.raise_xid(0, xid)).unwrap();
                }
            });
        }
    });
    let state = State::load(&path).unwrap();
    let sequences: Vec<u64> = state.events.iter().map(|e| e.sequence).collect();
    assert_eq!(sequences, (1..=100).collect::<Vec<_>>());
}

fn gpu_of(text: &str) -> Result<Gpu, String> {
    let text = format!(r#"{{"uuid": "GPU-1", "pci_bus_id": "0000:3b:00.0", {text}}}"#);
    serde_json::from_str(&text).map_err(|e| e.to_string())
}

#[test]
fn keys_left_out_are_a_healthy_gpus() {
    let gpu = gpu_of(r#""temperature": 50"#).unwrap();
    let healthy = State::healthy("a", 1).gpus.remove(0);
    let same = Gpu { temperature: 50, uuid: gpu.uuid.clone(), pci_bus_id: gpu.pci_bus_id.clone(), ..healthy };
    assert_eq!(gpu, Gpu { serial: gpu.serial.clone(), ..same });
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.json");
    for (gpu, reason) in [
        (r#"{"uuid": "GPU-1", "pci_bus_id": "nowhere"}"#, "GPU `GPU-1`: `nowhere` is no PCI address"),
        (r#"{"pci_bus_id": "0:1:0.0"}"#, "GPU 0 has no uuid"),
    ] {
        fs::write(&path, format!(r#"{{"node": "a", "driver_version": "1", "gpus": [{gpu}]}}"#)).unwrap();
        let refused = State::load(&path).unwrap_err().to_string();
        assert!(refused.contains(reason), "{refused}");
    }
}

#[test]
fn values_have_several_forms() {
    let throttle = |text: &str| gpu_of(&format!(r#""throttle": {text}"#)).map(|gpu| gpu.throttle.0);
    for (text, bits) in [
        (r#""none""#, 0),
        ("false", 0),
        ("[]", 0),
        ("true", 0x8),
        (r#""hw_thermal""#, 0x40),
        (r#"["sw_power_cap", "display_clocks"]"#, 0x104),
        ("4096", 4096),
    ] {
        assert_eq!(throttle(text), Ok(bits), "{text}");
        let gpu = gpu_of(&format!(r#""throttle": {text}"#)).unwrap();
        let again: Gpu = serde_json::from_value(serde_json::to_value(&gpu).unwrap()).unwrap();
        assert_eq!(again.throttle, gpu.throttle, "{text} is written as it can be read");
    }
    assert!(throttle(r#""hot""#).unwrap_err().contains("is none of none, gpu_idle"));
    assert!(throttle("-1").is_err() && throttle(r#"["hw_thermal", 3]"#).is_err());

    let action = |text: &str| gpu_of(&format!(r#""recovery_action": {text}"#)).map(|gpu| gpu.recovery_action);
    assert_eq!(action("4"), Ok(RecoveryAction::DrainAndReset));
    assert_eq!(action(r#""drain_p2p""#), Ok(RecoveryAction::DrainP2p));
    assert!(action("8").unwrap_err().contains("write 0 to 7 or one of none, reset"));

    let down = |text: &str| {
        let gpu = gpu_of(&format!(r#""nvlink_down": {text}"#)).unwrap();
        (0..4).map(|link| gpu.nvlink_down.has(link)).collect::<Vec<_>>()
    };
    assert_eq!(down("false"), [false; 4]);
    assert_eq!(down("[]"), [false; 4]);
    assert_eq!(down("true"), [true; 4]);
    assert_eq!(down("2"), [true, true, false, false]);
    assert_eq!(down("[1, 3]"), [false, true, false, true]);
}

#[test]
fn the_documentation_names_every_key() {
    let page = include_str!("../../../../docs/simdriver.md");
    let mut state = State::healthy("a", 1);
    state.raise_xid(0, 79).unwrap();
    state.gpus[0].fabric = Some(Fabric::default());
    let value = serde_json::to_value(&state).unwrap();
    let keys = |value: &serde_json::Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    let gpu = &value["gpus"][0];
    for key in [keys(&value), keys(gpu), keys(&value["events"][0]), keys(&gpu["fabric"])].concat() {
        assert!(page.contains(&format!("`{key}`")), "docs/simdriver.md says nothing of `{key}`");
    }
    for reason in &THROTTLES {
        assert!(page.contains(&format!("`{}`", reason.name)), "{}", reason.name);
    }
}
