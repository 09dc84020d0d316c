//! Plans that start where another ended, and GPUs that change their places.

use super::printed::Plan;
use super::{reknit, reknit_in, text};
use std::path::Path;

/// Writes the example with some lines replaced.
fn job(folder: &Path, lines: &[&str]) {
    let key = |line: &str| line.split(" = ").next().unwrap().to_owned();
    let example = text(reknit(&["job", "example"]).stdout);
    let new = |line| lines.iter().copied().find(|new| key(new) == key(line)).unwrap_or(line);
    let text: Vec<&str> = example.lines().map(new).collect();
    std::fs::write(folder.join("job.toml"), text.join("\n")).unwrap();
}

/// What the table says, whatever the exit status.
fn table(folder: &Path, args: &str) -> String {
    let all = format!("plan --job job.toml {args}");
    text(reknit_in(folder, &all.split_whitespace().collect::<Vec<_>>()).stdout)
}

/// Two replicas of two stages of two slots, four GPUs a rack, and a rack of two spares.
fn with_spares(folder: &Path) {
    job(folder, &["tensor = 2", "pipeline = 2", "spares = 2"]);
    let rack = |(node, gpus)| {
        format!("[[domain]]\nname = \"{node}\"\nnodes = [{{ name = \"{node}\", gpus = {gpus} }}]\n")
    };
    let topology: String = [("n0", 4), ("n1", 4), ("n2", 2)].map(rack).concat();
    std::fs::write(folder.join("topology.toml"), topology).unwrap();
}

fn plan(folder: &Path, args: &str) -> String {
    let all = format!("plan --job job.toml --topology topology.toml {args}");
    let output = reknit_in(folder, &all.split_whitespace().collect::<Vec<_>>());
    assert!(output.status.success(), "{args}: {}", text(output.stderr));
    text(output.stdout)
}

fn gpus(printed: &str) -> Vec<String> {
    let plan: Plan = serde_json::from_str(printed).unwrap();
    plan.gpus().values().map(|(gpu, _)| (*gpu).to_owned()).collect()
}

#[test]
fn a_gpu_whose_place_a_spare_took_can_still_be_named() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    with_spares(folder);
    let first = plan(folder, "--fail 0.0.1 --format json");
    assert!(!gpus(&first).contains(&"n0/1".to_owned()), "{first}");
    std::fs::write(folder.join("first.json"), &first).unwrap();
    let told = plan(folder, "--holdings first.json --fail n0/1 --fail 1.0.1 --format json");
    assert!(!gpus(&told).contains(&"n0/1".to_owned()), "{told}");
    let table = plan(folder, "--holdings first.json --fail n0/1 --fail 1.0.1");
    assert!(table.starts_with("1 of 8 GPUs gone, 1 GPU without a place gone, the job goes on: "), "{table}");
    // Dead and not named, it is taken for free: this is what the name is for.
    let again = plan(folder, "--holdings first.json --fail n2/0 --fail n2/1 --format json");
    assert!(gpus(&again).contains(&"n0/1".to_owned()), "{again}");
    let told = plan(folder, "--holdings first.json --fail n2/0 --fail n2/1 --fail n0/1 --format json");
    assert!(!gpus(&told).contains(&"n0/1".to_owned()), "{told}");
}

#[test]
fn one_gpu_may_be_named_in_several_ways() {
    let folder = tempfile::tempdir().unwrap();
    with_spares(folder.path());
    let all = plan(folder.path(), "--fail-node n0 --format json");
    assert_eq!(plan(folder.path(), "--fail 0.0.1 --fail n0/1 --fail-node n0 --format json"), all);
    let drained = plan(folder.path(), "--drain 0.0.1 --format json");
    assert_eq!(plan(folder.path(), "--drain 0.0.1 --drain n0/1 --format json"), drained);
}

#[test]
fn a_gpu_that_changes_its_stage_brings_nothing_of_the_new_one() {
    let folder = tempfile::tempdir().unwrap();
    with_spares(folder.path());
    let table = plan(folder.path(), "--fail 0.0.1 --fail 0.1.0");
    let headline = table.lines().next().unwrap();
    assert!(headline.contains("; spares take 0.0.0, 0.0.1, 0.0.0's GPU moves to 0.1.0; "), "{headline}");
    assert!(!headline.contains("change places"), "{headline}");
    assert!(table.contains("replica 0 stage 1: TP2 -> TP2  +█\n"), "{table}");
    let row = table.lines().find(|line| line.contains(" n0/0 ")).unwrap();
    let cells: Vec<_> = row.split_whitespace().collect();
    assert_eq!(cells.join(" "), "0 n0/0 joins - -> 0-5 - -> 0-23 - -> 0-7");
}

#[test]
fn groups_that_change_places_are_compared_by_their_gpus() {
    let folder = tempfile::tempdir().unwrap();
    job(folder.path(), &["tensor = 2", "pipeline = 2", "min_tensor = 1"]);
    let table = table(folder.path(), "--fail 0.0.1 --fail 1.1.1");
    let headline = table.lines().next().unwrap();
    assert!(headline.contains("stage 1 of replicas 0 and 1 change places, replica 0 goes on"), "{headline}");
    assert!(!headline.contains("moves to") && !headline.contains("spare"), "{headline}");
    let group = table.split("replica 0 stage 1: ").nth(1).unwrap();
    assert!(group.starts_with("TP2 -> TP1  █×\n"), "{table}");
    let row = group.lines().find(|line| line.contains("r1-s1/0")).unwrap();
    assert!(row.contains("0-5 -> 0-11"), "{row}");
    assert!(!table.contains("replica 1 stage 1: "), "its GPUs keep what they hold: {table}");
}

#[test]
fn what_is_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    job(folder, &["tensor = 4"]);
    let says = |args: &str, what: &str| {
        let table = table(folder, args);
        assert!(table.ends_with(&format!("  wait for {what}\n")), "{args}: {table}");
    };
    says("--fail 0.0.1 --fail 1.0.1", "any one of the GPUs that held them: 0.0.1, 1.0.1");
    says("--fail-node r0-s0 --fail 1.0.1", "any one of the GPUs that held them: 0.0.1, 1.0.1");
    says(
        "--fail 0.0.1 --fail 0.0.2 --fail 1.0.1 --fail 1.0.2",
        "enough of the GPUs that held them: 0.0.1, 0.0.2, 1.0.1, 1.0.2",
    );
    std::fs::write(folder.join("one.json"), table(folder, "--fail-node r0-s0 --format json")).unwrap();
    says("--holdings one.json --fail-node r0-s0 --fail 1.0.2", "the GPU that held them: 1.0.2");
    says(
        "--holdings one.json --fail-node r0-s0 --fail 1.0.1 --fail 1.0.2",
        "all of the GPUs that held them: 1.0.1, 1.0.2",
    );
    // The vocabularies of both ends are two: here only that of the first stage is lost.
    job(folder, &["tensor = 2", "pipeline = 2"]);
    says("--fail 0.0.1 --fail 0.1.1 --fail 1.0.1", "any one of the GPUs that held them: 0.0.1, 1.0.1");
}

#[test]
fn fewer_samples_in_the_usual_time_are_told() {
    let folder = tempfile::tempdir().unwrap();
    job(folder.path(), &["policy = \"shrink\""]);
    let table = table(folder.path(), "--fail 0.0.1");
    let headline = table.lines().next().unwrap();
    let says = ": a step takes as long as at full strength, at 0.75 of the throughput; ";
    assert!(headline.contains(says), "{headline}");
}
