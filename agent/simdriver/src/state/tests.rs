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
