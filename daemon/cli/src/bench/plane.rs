//! `reknit bench plane`: how fast ranks on this machine exchange data, each in a process of its own, beside plain copies
//! of the same bytes in the same run.

mod copies;
mod rank;
mod report;

use crate::failure::Failure;
use crate::output::{Format, print_lines};
use copies::Copies;
use rank::Order;
use reknit_plane::Transport;
use report::{Measured, Point};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

#[derive(Debug, clap::Args)]
pub(crate) struct PlaneArgs {
    /// Numbers of ranks.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [2, 4], value_parser = clap::value_parser!(u32).range(2..=64))]
    ranks: Vec<u32>,
    /// Of each rank's data, such as `4KiB`, `1MiB` or a number of bytes; multiples of 4.
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', default_value = "4KiB,1MiB,64MiB", value_parser = size)]
    sizes: Vec<usize>,
    #[arg(long, value_name = "KIND,...", value_delimiter = ',', default_value = "shm,unix,tcp")]
    transport: Vec<Way>,
    /// About how long each point is measured.
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    seconds: f64,
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
    /// Be one of the ranks: the command starts itself this way.
    #[arg(long, hide = true)]
    as_rank: Option<usize>,
}

/// How the data travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Way {
    /// Shared memory.
    Shm,
    /// Unix sockets.
    Unix,
    /// TCP over the loopback.
    Tcp,
}

impl Way {
    fn transport(self) -> Transport {
        match self {
            Self::Shm => Transport::Shared,
            Self::Unix => Transport::Unix,
            Self::Tcp => Transport::Tcp,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Unix => "unix",
            Self::Tcp => "tcp",
        }
    }
}

fn size(text: &str) -> Result<usize, String> {
    let (number, unit) = match text.strip_suffix("KiB") {
        Some(number) => (number, 1 << 10),
        None => match text.strip_suffix("MiB") {
            Some(number) => (number, 1 << 20),
            None => (text, 1),
        },
    };
    let bytes = number.parse::<usize>().ok().and_then(|number| number.checked_mul(unit));
    bytes
        .filter(|bytes| bytes.is_multiple_of(4) && (4..=1 << 30).contains(bytes))
        .ok_or_else(|| "a multiple of 4 up to 1024MiB, such as 4KiB, is expected".to_owned())
}

pub(crate) fn run(args: &PlaneArgs) -> Result<(), Failure> {
    if let Some(rank) = args.as_rank {
        return rank::run(rank);
    }
    if !(0.001..=600.0).contains(&args.seconds) {
        return Err(Failure::Usage(format!("--seconds {}: allowed are 0.001 to 600", args.seconds)));
    }
    let time = Duration::from_secs_f64(args.seconds);
    let mut points = Vec::new();
    for &ranks in &args.ranks {
        for &way in &args.transport {
            let order = Order { way, ranks: ranks as usize, sizes: args.sizes.clone(), time };
            points.extend(measure(&order)?);
        }
    }
    let most = args.ranks.iter().copied().max().unwrap_or(2) as usize;
    let copies = args.sizes.iter().map(|&bytes| Copies::measure(bytes, most, time));
    let copies = copies.collect::<Result<_, _>>().map_err(Failure::failed("a plain copy"))?;
    let measured = Measured { points, copies };
    match args.format {
        Format::Json => {
            let json = serde_json::to_string(&measured).map_err(Failure::failed("the figures as JSON"))?;
            print_lines(&[json])
        }
        Format::Table => print_lines(&measured.lines()),
    }
}

/// A rank in a process of its own, killed when dropped.
struct Rank {
    process: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Rank {
    fn start(rank: usize) -> Result<Rank, Failure> {
        let failed = |error: std::io::Error| Failure::Failed(format!("rank {rank} does not start: {error}"));
        let mut process = Command::new(std::env::current_exe().map_err(failed)?)
            .args(["bench", "plane", "--as-rank", &rank.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let (Some(to), Some(from)) = (process.stdin.take(), process.stdout.take()) else {
            return Err(Failure::Failed(format!("rank {rank} has no pipes")));
        };
        Ok(Rank { process, to, from: BufReader::new(from) })
    }

    fn tell(&mut self, what: &impl Serialize) -> Result<(), Failure> {
        let line = serde_json::to_string(what).map_err(Failure::failed("an order as JSON"))?;
        writeln!(self.to, "{line}").map_err(Failure::failed("a rank does not listen"))
    }

    fn hear<T: for<'a> Deserialize<'a>>(&mut self) -> Result<T, Failure> {
        let mut line = String::new();
        self.from.read_line(&mut line).map_err(Failure::failed("a rank does not speak"))?;
        if line.is_empty() {
            return Err(Failure::Failed("a rank has ended early; what it said is above".to_owned()));
        }
        serde_json::from_str(&line).map_err(Failure::failed("a rank speaks nonsense"))
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        // One that has ended already is no failure.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn measure(order: &Order) -> Result<Vec<Point>, Failure> {
    let mut ranks = (0..order.ranks).map(Rank::start).collect::<Result<Vec<_>, _>>()?;
    let mut members = Vec::new();
    for rank in &mut ranks {
        rank.tell(order)?;
        members.push(rank.hear::<rank::Address>()?);
    }
    for rank in &mut ranks {
        rank.tell(&members)?;
    }
    let points = ranks.iter_mut().map(Rank::hear::<Vec<Point>>).collect::<Result<Vec<_>, _>>()?;
    // Rank 0 holds the clock.
    Ok(points.into_iter().flatten().collect())
}

/// Times of `round`, as many as fit into `time` but at least five.
fn times(
    time: Duration,
    mut round: impl FnMut() -> Result<Duration, std::io::Error>,
) -> Result<Vec<f64>, std::io::Error> {
    let start = Instant::now();
    let mut times = Vec::new();
    while times.len() < 5 || (start.elapsed() < time && times.len() < 5000) {
        times.push(round()?.as_secs_f64() * 1e6);
    }
    Ok(times)
}

/// The least and the middle one, to a tenth. `times` is not empty.
fn best_and_median(mut times: Vec<f64>) -> (f64, f64) {
    times.sort_by(f64::total_cmp);
    let tenth = |time: f64| (time * 10.0).round() / 10.0;
    (tenth(times[0]), tenth(times[times.len() / 2]))
}
