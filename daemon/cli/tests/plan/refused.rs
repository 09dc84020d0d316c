//! What cannot be asked: one line that says why, and status 64.

use super::{reknit, reknit_in, text};
use std::path::Path;

#[track_caller]
fn refused(folder: &Path, args: &[&str], says: &str) {
    let output = reknit_in(folder, args);
    let error = text(output.stderr);
    assert_eq!(output.status.code(), Some(64), "{args:?}: {error}");
    assert!(output.stdout.is_empty(), "{args:?}");
    assert_eq!(error.lines().count(), 1, "{args:?}: {error}");
    assert!(error.contains(says), "{args:?}: {error}");
}

#[test]
fn wrong_arguments() {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/plan/data"));
    let long = "n".repeat(65);
    for (args, says) in [
        (&["--fail", "0.0.4"][..], "--fail 0.0.4 is no place of the job: allowed are 0.0.0 to 1.0.3"),
        (&["--drain", "2.0.0"], "--drain 2.0.0 is no place of the job: allowed are 0.0.0 to 1.0.3"),
        (&["--fail", "0.1.0"], "0.1.0 is no place of the job"),
        (
            &["--fail", "0.0"],
            "`0.0` is not a place: write replica.stage.slot, such as 1.0.3, or the name of a GPU",
        ),
        (&["--fail", "0.0.4294967296"], "`0.0.4294967296` is not a place"),
        (&["--fail", "0.0.1", "--fail", "0.0.1"], "--fail 0.0.1 is given twice: name each once"),
        (&["--fail", "r0-s0/1", "--fail", "r0-s0/1"], "--fail r0-s0/1 is given twice: name each once"),
        (&["--fail", "0.0.1", "--drain", "0.0.1"], "0.0.1 is named by --fail and by --drain"),
        (&["--fail", "0.0.1", "--drain", "r0-s0/1"], "0.0.1 is named by --fail and by --drain"),
        (&["--drain", "0.0.1", "--fail-node", "r0-s0"], "0.0.1 is named by --fail-node r0-s0 and by --drain"),
        (&["--fail", "r0-s0/4"], "--fail r0-s0/4: no such GPU; allowed are r0-s0/0 to r0-s0/3"),
        (&["--drain", "n0/0"], "--drain n0/0: no such node; allowed are the topology's 2 nodes"),
        (
            &["--fail", "0.0.1", "0.0.2"],
            "unexpected argument `0.0.2`: an option takes one GPU, repeat --fail for each",
        ),
        (&["--fail", "0.0.1,0.0.2"], "`0.0.1,0.0.2` is more than one: repeat the option for each GPU"),
        (&["0.0.1"], "unexpected argument `0.0.1`: see reknit plan --help"),
        (&["--fail-node", "r0-s0", "--fail-node", "r0-s0"], "--fail-node r0-s0 is given twice"),
        (
            &["--fail-node", "r0s0"],
            "--fail-node r0s0: no such node; allowed are the topology's 2 nodes, such as r0-s0, r1-s0",
        ),
        (
            &["--mode", "raid"],
            "`raid` is not a mode: allowed are ntp, uniform_reduction, drop_replica and power_of_two",
        ),
        (&["--contingency", "3"], "3 is not in 1..=2"),
        (&["--contingency", "-1"], "-1"),
        (&["--format", "yaml"], "[possible values: table, json]"),
        (&["--holdings", "nowhere.json"], "nowhere.json: No such file"),
        (&["--holdings", "."], ".: Is a directory"),
        (&["--fail-node", "a\u{1b}[31m\nb"], "--fail-node a\\u{1b}[31m\\nb: no such node"),
        (&["--fail-node", &long], "--fail-node is given 65 bytes: names of nodes have up to 64"),
        (&["--holdings", "no\nwhere.json"], "no\\nwhere.json: No such file"),
        (&["--topology", "job.toml"], "job.toml: line "),
        (&["--topology", "racks.toml", "--fail-node", "r0-s0"], "--fail-node r0-s0: no such node"),
    ] {
        refused(folder, &[&["plan", "--job", "job.toml"], args].concat(), says);
    }
    refused(folder, &["plan", "--job", "nowhere.toml"], "nowhere.toml: No such file");
    for args in [&["plan", "--job", "/dev/zero"][..], &["job", "submit", "/dev/zero"]] {
        refused(folder, args, "/dev/zero: larger than 1048576 bytes, which are allowed");
    }
    refused(folder, &["plan"], "--job");
    for gpus in ["0", "64", "100", "130", "4294967295", "1048640"] {
        let says =
            format!("--gpus {gpus}: allowed are the multiples of 64 (one replica) from 128 to 1048576");
        refused(folder, &["bench", "planner", "--gpus", gpus], &says);
    }
    refused(folder, &["bench", "planner", "--gpus", "128", "--runs", "0"], "0 is not in 1..=10000");
}

/// The example with one line replaced.
fn with(line: &str) -> String {
    let example = text(reknit(&["job", "example"]).stdout);
    let key = line.split(" = ").next().unwrap();
    let is = |text: &str| text.starts_with(&format!("{key} = "));
    assert_eq!(example.lines().filter(|text| is(text)).count(), 1, "{key}");
    example.lines().map(|text| if is(text) { line } else { text }.to_owned() + "\n").collect()
}

#[test]
fn wrong_job_files() {
    let folder = tempfile::tempdir().unwrap();
    for (line, says) in [
        ("layers = 0", "model.layers = 0 is out of range: allowed are 1 to"),
        ("tensor = 0", "parallel.tensor = 0 is out of range: allowed are 1 to"),
        ("ffn_block = 17", "model.ffn = 768 is not divisible by ffn_block = 17"),
        ("vocab_block = 7", "model.vocab = 256 is not divisible by vocab_block = 7"),
        ("pipeline = 5", "parallel.pipeline = 5 is out of range: allowed are 1 to 4"),
        ("hidden = 9223372036854775807", "model.hidden: invalid value"),
        ("seed = 9223372036854775808", "run.seed"),
        ("spares = 4294967295", "recovery.spares = 4294967295 is out of range: allowed are 0 to 1024"),
        ("colour = 1", "unknown key `colour`"),
    ] {
        let text =
            if line.starts_with("colour") { format!("{line}\n{}", with("layers = 4")) } else { with(line) };
        std::fs::write(folder.path().join("job.toml"), &text).unwrap();
        let at = text.lines().position(|found| found == line).unwrap() + 1;
        let at =
            if says.starts_with("model.ffn =") || says.starts_with("model.vocab =") { at - 1 } else { at };
        refused(folder.path(), &["plan", "--job", "job.toml"], &format!("job.toml: line {at}: "));
        refused(folder.path(), &["plan", "--job", "job.toml"], says);
    }
}

#[test]
fn what_can_only_be_planned_is_planned_but_not_submitted() {
    let folder = tempfile::tempdir().unwrap();
    for line in ["pipeline = 2", "policy = \"shrink\"", "power_boost = true"] {
        std::fs::write(folder.path().join("job.toml"), with(line)).unwrap();
        let output = reknit_in(folder.path(), &["plan", "--job", "job.toml", "--fail", "0.0.1"]);
        assert!(output.status.success(), "{line}: {}", text(output.stderr));
        refused(folder.path(), &["job", "submit", "job.toml"], " is not supported yet");
    }
}

#[test]
fn wrong_holdings() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("job.toml"), with("layers = 4")).unwrap();
    let all = text(reknit_in(folder.path(), &["plan", "--job", "job.toml", "--format", "json"]).stdout);
    let place = |units: &str| format!("{{\"0.0.0\": {{\"step\": 7, \"units\": {units}}}}}");
    let last = "\"gpu\":\"r1-s0/3\"";
    assert!(all.contains(last), "{all}");
    let slot = format!("{{\"slot\":3,{last},\"active\":true}}");
    assert!(all.contains(&slot), "{all}");
    for (holdings, says) in [
        ("".to_owned(), "line 1: EOF"),
        ("[]".to_owned(), "expected an object of places, or a plan"),
        ("{\"0.0.0\": 3}".to_owned(), "expected an object with `step` and `units` at 0.0.0"),
        ("{\n\"0.0.4\": 3}".to_owned(), "line 2: 0.0.4 is no place of the job: allowed are 0.0.0 to 1.0.3"),
        ("{\"0.0\": 3}".to_owned(), "`0.0` is not a place"),
        ("{\"0\\n0\": 3}".to_owned(), "`0\\n0` is not a place"),
        ("{\"0 at line 3\": 3}".to_owned(), "`0 at line 3` is not a place: write"),
        (all.replace(&slot, "[3,\"r1-s0/3\",true]"), "line 1: invalid type: sequence, expected a table"),
        ("{\"0.0.0\": {\"step\": 1}}".to_owned(), "0.0.0: missing key `units`"),
        ("{\"0.0.0\": {\"units\": {}}}".to_owned(), "0.0.0: missing key `step`"),
        ("{\"0.0.0\": {\"stp\": 1}}".to_owned(), "0.0.0: unknown key `stp`, allowed are `step`, `units`"),
        (
            "{\"0.0.0\": {\"step\": -1, \"units\": {}}}".to_owned(),
            "invalid value: integer `-1`, expected u64",
        ),
        ("{\"0.0.0\": {\"step\": 1e99, \"units\": {}}}".to_owned(), "line 1: "),
        (
            place("{\"attn/4\": []}"),
            "0.0.0.units: attn/4 is not an axis of stage 0: allowed are layers 0 to 3",
        ),
        (place("{\"attn/99999999999\": []}"), "`attn/99999999999` is not an axis"),
        (place("{\"moe/0\": []}"), "`moe/0` is not an axis: write attn/LAYER, ffn/LAYER or vocab"),
        (place("{\"attn/0\": [[0, 13]]}"), "0.0.0.units: attn/0: [0, 13] is not an interval"),
        (
            place("{\"attn/0\": [[3, 3]]}"),
            "[3, 3] is not an interval: allowed are [start, end] with start < end up to 12",
        ),
        (place("{\"attn/0\": [[3, 2]]}"), "[3, 2] is not an interval"),
        (
            place("{\"attn/0\": [[0, 4], [3, 5]]}"),
            "[3, 5] begins before 4: intervals ascend and do not overlap",
        ),
        (place("{\"attn/0\": [[0, 9223372036854775807]]}"), "0.0.0.units: attn/0: "),
        (place("{\"attn/0\": [[0]]}"), "0.0.0.units: attn/0: "),
        (place("{\"attn/0\": [], \"attn/0\": []}"), "attn/0 stands twice"),
        (
            "{\"0.0.0\": {\"step\": 1, \"units\": {}}, \"0.0.0\": {\"step\": 1, \"units\": {}}}".to_owned(),
            "0.0.0 stands twice",
        ),
        ("{} {}".to_owned(), "trailing characters"),
        ("{\"groups\": []}".to_owned(), "groups are missing"),
        (all.replace("\"version\":1", "\"version\":2"), "version = 2: allowed is 1"),
        (all.replace("\"recoverable\":true", "\"recoverable\":false"), "recoverable = false"),
        (all.replace(last, "\"gpu\":\"r1-s0/2\""), "1.0.3: GPU r1-s0/2 sits at another place too"),
        (all.replace(last, "\"gpu\":\"elsewhere/0\""), "GPU elsewhere/0 at 1.0.3 is not in the topology"),
        (
            all.replace("r0-s0/1", "first").replace("r1-s0/1", "r0-s0/1").replace("first", "r1-s0/1"),
            "group 0.0: GPU r0-s0/0 is in domain r0-s0, but r1-s0/1 in r1-s0; a group sits within one; give the \
             --topology that the plan was made with",
        ),
        (all.replace("\"replica\":1", "\"replica\":0"), "group 0.0 stands twice"),
        (all.replace("\"replica\":1", "\"replica\":2"), "group 2.0: 2.0.0 is no place of the job"),
        (all.replace("\"active\":true", "\"active\":false"), "slot 0 is not active but owns units 0-2"),
        (all.replace("\"layers\":[0,4]", "\"layers\":[0,4294967295]"), "attn/4 is not an axis of stage 0"),
        (all.replace("\"layers\":[0,4]", "\"layers\":null"), "attn has layers: allowed is [start, end]"),
        (
            all.replacen('{', "{\"0.0.0\": {\"step\": 0, \"units\": {}},", 1),
            "0.0.0 stands beside the keys of a plan",
        ),
    ] {
        std::fs::write(folder.path().join("holdings.json"), &holdings).unwrap();
        let args = ["plan", "--job", "job.toml", "--holdings", "holdings.json"];
        refused(folder.path(), &args, says);
        refused(folder.path(), &args, "holdings.json: ");
    }
}

#[test]
fn every_unit_lives_but_no_replica_has_enough() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("job.toml"), with("min_tensor = 4")).unwrap();
    let output =
        reknit_in(folder.path(), &["plan", "--job", "job.toml", "--fail", "0.0.1", "--fail", "1.0.2"]);
    let error = text(output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(output.stdout.is_empty());
    assert!(error.contains("no replica has 4 active slots") && error.contains("every unit still"), "{error}");

    let args = "plan --job job.toml --fail 0.0.1 --fail 1.0.2 --format json";
    let output = reknit_in(folder.path(), &args.split(' ').collect::<Vec<_>>());
    assert_eq!(output.status.code(), Some(1));
    let printed = text(output.stdout);
    let json: serde_json::Value = serde_json::from_str(&printed).unwrap();
    assert_eq!((&json["recoverable"], &json["unrecoverable_units"]), (&true.into(), &serde_json::json!([])));
    assert_eq!(json["batch"], serde_json::json!([0, 0]));
    assert!(json["totals"]["step_time_ratio"].is_null());
    // It says of nobody what it holds, so nothing can be planned from it.
    std::fs::write(folder.path().join("nobody.json"), printed).unwrap();
    let next = ["plan", "--job", "job.toml", "--holdings", "nobody.json"];
    refused(folder.path(), &next, "nobody trains in this plan");
}

#[test]
fn the_status_tells_what_is_wrong_where_no_text_can_be_written() {
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let mut plan = std::process::Command::new(env!("CARGO_BIN_EXE_reknit"));
    let status = plan.args(["plan", "--job", "nowhere.toml"]).stderr(full).status().unwrap();
    assert_eq!(status.code(), Some(64));
}

/// The vocabulary rows of the last stage are not those of the first.
#[test]
fn no_replica_has_enough_and_the_embedding_is_lost() {
    let folder = tempfile::tempdir().unwrap();
    let job = with("min_tensor = 4").replace("pipeline = 1", "pipeline = 2");
    std::fs::write(folder.path().join("job.toml"), job).unwrap();
    let run = |more: &[&str]| reknit_in(folder.path(), &[&["plan", "--job", "job.toml"], more].concat());
    let all: serde_json::Value = serde_json::from_slice(&run(&["--format", "json"]).stdout).unwrap();
    let mut held = serde_json::Map::new();
    for group in all["groups"].as_array().unwrap() {
        for slot in 0..4_usize {
            let mut units = serde_json::Map::new();
            for partition in group["partitions"].as_array().unwrap() {
                let (family, owned) = (partition["family"].as_str().unwrap(), &partition["owned"][slot]);
                match partition["layers"].as_array() {
                    Some(layers) => {
                        for layer in layers[0].as_u64().unwrap()..layers[1].as_u64().unwrap() {
                            units.insert(format!("{family}/{layer}"), owned.clone());
                        }
                    }
                    None if (group["stage"].as_u64(), slot) == (Some(0), 0) => {}
                    None => drop(units.insert(family.to_owned(), owned.clone())),
                }
            }
            let place = format!("{}.{}.{slot}", group["replica"], group["stage"]);
            held.insert(place, serde_json::json!({ "step": 3, "units": units }));
        }
    }
    let holdings = serde_json::Value::Object(held).to_string();
    std::fs::write(folder.path().join("holdings.json"), holdings).unwrap();
    let output = run(&["--holdings", "holdings.json", "--fail", "0.1.1", "--fail", "1.1.2"]);
    let error = text(output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("no live GPU holds vocab units 0-3:"), "{error}");
}

#[test]
fn a_plan_that_does_not_fit_the_memory() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("job.toml"), with("layers = 4")).unwrap();
    let topology = |mib: f64| {
        let gib = mib / 1024.0;
        let domain = |name: u32| {
            format!("[[domain]]\nname = \"d{name}\"\nnodes = [{{ name = \"n{name}\", gpus = 4 }}]\n")
        };
        format!("[gpu]\nmemory_gib = {gib:?}\n{}{}", domain(0), domain(1))
    };
    let plan = ["plan", "--job", "job.toml", "--topology", "topology.toml", "--fail", "0.0.1"];
    // 27.2 MiB are needed with 4 slots, 33.9 MiB with 3.
    std::fs::write(folder.path().join("topology.toml"), topology(32.0)).unwrap();
    let output = reknit_in(folder.path(), &plan);
    let error = text(output.stderr);
    assert_eq!((output.status.code(), output.stdout.is_empty()), (Some(1), true), "{error}");
    assert!(error.contains("the slot at 0.0.0 would need 33.") && error.contains("has 32.00 MiB"), "{error}");
    assert!(reknit_in(folder.path(), &plan[..5]).status.success(), "the nominal layout fits");
    std::fs::write(folder.path().join("topology.toml"), topology(40.0)).unwrap();
    assert!(reknit_in(folder.path(), &plan).status.success());
}
