//! Plans that start where another ended, and GPUs that change their places.

use super::printed::Plan;
use super::{reknit, reknit_in, text};
use std::path::Path;

/// Two replicas of two stages of two slots, four GPUs a rack, and a rack of two spares.
fn with_spares(folder: &Path) {
    let example = text(reknit(&["job", "example"]).stdout);
    let lines = example.lines().map(|line| match line.split(" = ").next() {
        Some("tensor") => "tensor = 2",
        Some("pipeline") => "pipeline = 2",
        Some("spares") => "spares = 2",
        _ => line,
    });
    std::fs::write(folder.join("job.toml"), lines.collect::<Vec<_>>().join("\n")).unwrap();
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
    let next = plan(folder, "--holdings first.json --fail 1.0.1 --format json");
    let told = plan(folder, "--holdings first.json --fail n0/1 --fail 1.0.1 --format json");
    assert!(!gpus(&told).contains(&"n0/1".to_owned()), "{told}");
    assert_eq!(gpus(&next).len(), gpus(&told).len());
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
