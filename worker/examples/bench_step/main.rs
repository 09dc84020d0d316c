//! What a step costs beside its computing, at about 10 million parameters: how much of the sum over replicas is hidden
//! under the backward pass, what the hand-over to column hosts adds, what orchestration adds, and how long a checkpoint stops it. Ranks are threads of
//! this process over the real host plane, so they share its processors: of what is not waiting, processor time tells
//! more than the clock. The ways to take a step alternate, and every figure is of medians of one run.
//!
//! `cargo run --release -p reknit-worker --example bench_step -- sums|orchestration|checkpoints [ROUNDS [LINK [LAYOUT]]]`: LINK is the rate in
//! MB/s of a pretended link between replicas that takes no processor, as on a cluster; 0 for none. LAYOUT is one of those printed, or
//! its beginning.

mod checkpoints;
mod lineup;
mod link;
mod orchestrated;

use lineup::{Orders, Rank, Times, hire, job, line_up};
use orchestrated::Orchestrated;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

/// How a step treats the sum over replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Gradients leave under the backward pass.
    Under,
    /// They leave after it.
    After,
    /// They stay.
    Without,
    /// Under the pass, but nothing is handed over: what others own of a host's column is left out.
    Alone,
}

fn main() {
    let mut args = std::env::args().skip(1);
    let what = args.next().expect("what to measure: sums, orchestration or checkpoints");
    let rounds = args.next().map_or(15, |text| text.parse().expect("ROUNDS is a number"));
    let link = args.next().map_or(0.0, |text| text.parse().expect("LINK is a number"));
    match what.as_str() {
        "sums" => sums(rounds, link, &args.next().unwrap_or_default()),
        "orchestration" => orchestration(rounds),
        "checkpoints" => checkpoints::checkpoints(rounds),
        other => panic!("{other} is none of sums, orchestration, checkpoints"),
    }
}

fn sums(rounds: usize, link: f64, only: &str) {
    println!(
        "medians in ms        step: under, after, without | sums after backward: under, after | hidden of can be"
    );
    for (name, data, tensor, lost) in
        [("2x2", 2, 2, false), ("3x1", 3, 1, false), ("2x2 minus 1", 2, 2, true), ("2x3 minus 1", 2, 3, true)]
    {
        if !name.starts_with(only) {
            continue;
        }
        let mut ranks = line_up(data, tensor, lost, link);
        let mut ways = vec![Way::Under, Way::After, Way::Without];
        if lost {
            ways.push(Way::Alone);
        }
        let times = measure(&mut ranks, &ways, rounds);
        let of = |way: Way, what: fn(&Times) -> Duration| {
            median(times.iter().filter(|times| times.way == way).map(what))
        };
        let step = |way| of(way, |times| times.step);
        let sums = |way| of(way, |times| times.sums);
        let hidden = 1.0 - sums(Way::Under) / sums(Way::After);
        print!(
            "{name:12} {:12.1} {:7.1} {:7.1} | {:20.1} {:7.1} | {:5.0}% of {:.0}%",
            step(Way::Under),
            step(Way::After),
            step(Way::Without),
            sums(Way::Under),
            sums(Way::After),
            hidden * 100.0,
            ranks[0].hideable() * 100.0
        );
        if lost {
            let processor = |way| of(way, |times| times.processor);
            let backward = of(Way::Alone, |times| times.backward);
            let longer = (step(Way::Under) - step(Way::Alone)) / backward;
            // Of a step about two thirds are backward.
            let costs = (processor(Way::Under) / processor(Way::Alone) - 1.0) * 1.5;
            print!(
                "; hand-over {:+.1}% of backward, {:+.1}% of its processor time",
                longer * 100.0,
                costs * 100.0
            );
        }
        println!();
    }
}

/// The same step with and without what a worker does around it, the session's thread looking on.
fn orchestration(rounds: usize) {
    let folder = tempfile::tempdir().expect("there is room for files");
    let job = Arc::new(job(2, 2, &write_text(folder.path())));
    let members = hire(&job, false, 0.0);
    let orders = Orders::new(&job, &members);
    let mut bare = line_up(2, 2, false, 0.0);
    let (start, over) = (Barrier::new(members.len()), AtomicBool::new(false));
    let times: Vec<_> = std::thread::scope(|scope| {
        let running: Vec<_> = members
            .iter()
            .zip(&mut bare)
            .map(|(member, bare)| {
                let (job, orders, start, over) = (&job, &orders, &start, &over);
                scope.spawn(move || {
                    let mut rank = Orchestrated::join(job, orders, member);
                    let status = rank.status();
                    let session = scope.spawn(move || {
                        while !over.load(Ordering::Relaxed) {
                            std::hint::black_box((status.trained(), status.pace().activity()));
                            std::thread::sleep(Duration::from_millis(100));
                        }
                    });
                    let mut times = Vec::new();
                    for round in 0..rounds + 2 {
                        let [with, without] = [true, false].map(|orchestrated| {
                            start.wait();
                            let begun = processor_time();
                            let step = if orchestrated { rank.step() } else { bare.step(Way::Under).step };
                            start.wait();
                            (step, processor_time() - begun)
                        });
                        if round >= 2 {
                            times.push((with, without));
                        }
                    }
                    start.wait();
                    over.store(true, Ordering::Relaxed);
                    session.join().expect("the session ends");
                    times
                })
            })
            .collect();
        let mut times: Vec<_> = running.into_iter().map(|rank| rank.join().expect("a rank failed")).collect();
        times.swap_remove(0)
    });
    let [with, without, with_processor, without_processor] = [
        median(times.iter().map(|(with, _)| with.0)),
        median(times.iter().map(|(_, without)| without.0)),
        median(times.iter().map(|(with, _)| with.1)),
        median(times.iter().map(|(_, without)| without.1)),
    ];
    println!(
        "2x2, a step with orchestration {with:.1} ms, without {without:.1} ms: {:+.1}%; processor time {:+.1}%",
        (with / without - 1.0) * 100.0,
        (with_processor / without_processor - 1.0) * 100.0
    );
}

/// A text to train on: its path.
fn write_text(folder: &Path) -> String {
    let text = folder.join("text");
    let words: String = (0..4000).map(|i| format!("line {i} of {} words, ", i * 7919 % 1013)).collect();
    std::fs::write(&text, words).expect("the text can be written");
    text.display().to_string()
}

/// Of all threads that this process has had, in ticks of 10 ms.
fn processor_time() -> Duration {
    let text = std::fs::read_to_string("/proc/self/stat").expect("this is Linux");
    let after_name = text.rsplit(')').next().unwrap_or_default();
    let ticks = after_name.split_whitespace().skip(11).take(2).filter_map(|ticks| ticks.parse::<u64>().ok());
    Duration::from_millis(10 * ticks.sum::<u64>())
}

/// Every step: as long as the slowest rank took, and the sums as long as the rank that came to them last, which waits
/// for no other's computing.
fn measure(ranks: &mut [Rank], ways: &[Way], rounds: usize) -> Vec<Times> {
    let start = Barrier::new(ranks.len());
    std::thread::scope(|scope| {
        let running: Vec<_> = ranks
            .iter_mut()
            .map(|rank| {
                let start = &start;
                scope.spawn(move || {
                    let mut times = Vec::new();
                    for round in 0..rounds + 2 {
                        for way in ways {
                            start.wait();
                            let begun = processor_time();
                            let mut step = rank.step(*way);
                            start.wait();
                            step.processor = processor_time() - begun;
                            // The first ones find the memory unmapped.
                            if round >= 2 {
                                times.push(step);
                            }
                        }
                    }
                    times
                })
            })
            .collect();
        let ranks = running.into_iter().map(|rank| rank.join().expect("a rank failed"));
        let together = |all: Vec<Times>, one: Vec<Times>| {
            let steps = all.into_iter().zip(one).map(|(all, one)| Times {
                way: all.way,
                step: all.step.max(one.step),
                backward: all.backward.max(one.backward),
                processor: all.processor,
                sums: all.sums.min(one.sums),
            });
            steps.collect()
        };
        ranks.reduce(together).expect("there are ranks")
    })
}

fn median(times: impl Iterator<Item = Duration>) -> f64 {
    let mut times: Vec<_> = times.collect();
    times.sort();
    times[times.len() / 2].as_secs_f64() * 1e3
}
