//! What is printed, letter by letter: the files of `golden`, and the examples of docs/planning.md.
//!
//! After a wanted change run the tests once with REKNIT_UPDATE_GOLDEN=1, and look at what git shows.

use super::{reknit, text};
use std::path::{Path, PathBuf};

/// What a command prints, and how it ends.
fn printed(command: &str) -> String {
    let mut words = command.split_whitespace();
    assert_eq!(words.next(), Some("reknit"), "{command}");
    let output = reknit(&words.collect::<Vec<_>>());
    let mut all = text(output.stdout) + &text(output.stderr);
    if let Some(status @ 1..) = output.status.code() {
        all += &format!("exit status {status}\n");
    }
    all
}

fn updates() -> bool {
    std::env::var_os("REKNIT_UPDATE_GOLDEN").is_some()
}

#[track_caller]
fn compare(path: &Path, expected: &str, found: &str) {
    if updates() {
        std::fs::write(path, found).unwrap();
    } else {
        assert_eq!(expected, found, "{}: see the head of golden.rs if this change is wanted", path.display());
    }
}

#[test]
fn commands_print_what_they_printed() {
    for (name, command) in [
        ("../data/one-loss.json", "reknit plan --job job.toml --fail 0.0.1 --format json"),
        // After two losses the slots of replica 0 hold units that are not their nominal ones.
        (
            "../data/next-loss.json",
            "reknit plan --job job.toml --holdings one-loss.json --fail 0.0.0 --format json",
        ),
        ("whole-again.txt", "reknit plan --job job.toml --holdings next-loss.json"),
        ("nothing-lost.txt", "reknit plan --job job.toml"),
        (
            "loss-and-drain.json",
            "reknit plan --job job.toml --fail 0.0.1 --drain 1.0.3 --contingency 2 --format json",
        ),
        ("all-lost.txt", "reknit plan --job job.toml --fail-node r0-s0 --fail-node r1-s0"),
        ("all-lost.json", "reknit plan --job job.toml --fail-node r0-s0 --fail-node r1-s0 --format json"),
        ("half-done.txt", "reknit plan --job job.toml --holdings half-done.json --fail 0.0.1"),
        ("uniform.txt", "reknit plan --job job.toml --fail 0.0.1 --mode uniform_reduction"),
        ("dropped.txt", "reknit plan --job job.toml --fail 0.0.1 --mode drop_replica"),
        ("power-of-two.txt", "reknit plan --job job.toml --fail 0.0.1 --mode power_of_two"),
        (
            "racks.txt",
            "reknit plan --job large.toml --topology racks.toml --fail 0.0.3 --fail 0.1.5 --fail 2.1.0",
        ),
        (
            "racks.json",
            "reknit plan --job large.toml --topology racks.toml --fail 0.0.3 --fail 0.1.5 --fail 2.1.0 --format json",
        ),
    ] {
        let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/plan/golden")).join(name);
        let expected = std::fs::read_to_string(&path).unwrap_or_default();
        compare(&path, &expected, &printed(command));
    }
}

/// The document's blocks of `console`: a command after `$ ` and what it prints.
#[test]
fn the_document_shows_what_is_printed() {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/planning.md"));
    let expected = std::fs::read_to_string(path).unwrap();
    let mut found = String::new();
    let mut commands = 0;
    let mut rest = expected.as_str();
    while let Some((before, after)) = rest.split_once("```console\n$ ") {
        let (command, shown) = after.split_once('\n').unwrap();
        found += &format!("{before}```console\n$ {command}\n{}", printed(command));
        rest = &shown[shown.find("```").unwrap()..];
        commands += 1;
    }
    found += rest;
    assert!(commands >= 4, "{commands} commands are found in the document");
    compare(path, &expected, &found);
}
