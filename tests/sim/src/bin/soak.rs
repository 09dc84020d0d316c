//! Runs many seeds on all cores: `soak SEEDS START`, or one and prints it with `TRACE=1`.

use reknit_control_sim::{Ending, Sabotage, Script, Statistics, replay};
use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;

/// What a thread reports of a seed.
type Report = (u64, Result<(Vec<Ending>, Statistics), String>);

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

fn run(seed: u64, trace: bool) -> Result<(Vec<Ending>, Statistics), String> {
    let run = || replay(&Script::draw(seed), Sabotage::None, trace);
    match std::panic::catch_unwind(run) {
        Ok(Ok(outcome)) => Ok((outcome.endings, outcome.statistics)),
        Ok(Err(violation)) => Err(violation),
        Err(_) => Err("a panic: see above".to_owned()),
    }
}

fn main() -> ExitCode {
    let (seeds, start, trace) = (number("SEEDS", 1_000), number("START", 0), number("TRACE", 0) > 0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let (next, stop) = (AtomicU64::new(start), AtomicBool::new(false));
    let (sender, reports) = mpsc::channel::<Report>();
    let (next, stop) = (&next, &stop);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            let sender = sender.clone();
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= start + seeds || sender.send((seed, run(seed, trace))).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        let code = collect(&reports, seeds);
        stop.store(true, Ordering::Relaxed);
        code
    })
}

fn collect(reports: &mpsc::Receiver<Report>, seeds: u64) -> ExitCode {
    let mut sum = Statistics::default();
    let mut endings: BTreeMap<Ending, u64> = BTreeMap::new();
    let (mut done, terminal) = (0, std::io::stderr().is_terminal());
    for (seed, report) in reports {
        match report {
            Ok((ended, statistics)) => {
                sum.add(&statistics);
                for ending in ended {
                    *endings.entry(ending).or_default() += 1;
                }
            }
            Err(violation) => {
                eprintln!("seed {seed}: {violation}");
                eprintln!("{}", Script::draw(seed));
                eprintln!("replay: make soak SEEDS=1 START={seed} TRACE=1");
                return ExitCode::FAILURE;
            }
        }
        done += 1;
        if terminal && done % 100 == 0 {
            eprint!("\r{done} of {seeds}");
        }
    }
    if terminal {
        eprintln!();
    }
    println!("{done} seeds, 0 violations");
    for (what, count) in sum.faults.iter().chain(&sum.deeds) {
        println!("{count:>9} {what}");
    }
    println!("{:>9} epochs", sum.epochs);
    for (ending, count) in &endings {
        println!("{count:>9} jobs ended {ending:?}");
    }
    println!("{:>9} events, {:.1} virtual hours", sum.events, sum.virtual_ms as f64 / 3_600_000.0);
    ExitCode::SUCCESS
}
