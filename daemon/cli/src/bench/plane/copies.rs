//! The same bytes copied without any data plane: what this machine can do.

use super::{best_and_median, times};
use serde::Serialize;
use std::hint::black_box;
use std::io::{Error, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Barrier;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

/// Medians, in microseconds.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Copies {
    pub(super) bytes: usize,
    /// One thread alone.
    pub(super) memcpy_us: f64,
    /// As many threads at the same time as the largest group has ranks: each copies all the bytes.
    pub(super) memcpy_together_us: f64,
    /// One thread writes, another reads.
    pub(super) unix_us: f64,
    pub(super) tcp_us: f64,
}

impl Copies {
    pub(super) fn measure(bytes: usize, together: usize, time: Duration) -> Result<Copies, Error> {
        let tcp = || {
            let listener = TcpListener::bind("127.0.0.1:0")?;
            let far = TcpStream::connect(listener.local_addr()?)?;
            let near = listener.accept()?.0;
            far.set_nodelay(true)?;
            Ok::<_, Error>((near, far))
        };
        let (unix_near, unix_far) = UnixStream::pair()?;
        let (tcp_near, tcp_far) = tcp()?;
        Ok(Copies {
            bytes,
            memcpy_us: memcpy(bytes, 1, time)?,
            memcpy_together_us: memcpy(bytes, together, time)?,
            unix_us: stream(bytes, unix_near, unix_far, time)?,
            tcp_us: stream(bytes, tcp_near, tcp_far, time)?,
        })
    }
}

fn memcpy(bytes: usize, threads: usize, time: Duration) -> Result<f64, Error> {
    // All do as many rounds as this one, which is the one that is timed.
    let round = Barrier::new(threads);
    let copy = |rounds: Option<usize>| {
        let (from, mut to) = (vec![1_u8; bytes], vec![2_u8; bytes]);
        let mut once = || {
            round.wait();
            let start = Instant::now();
            to.copy_from_slice(black_box(&from));
            black_box(&mut to);
            Ok(start.elapsed())
        };
        match rounds {
            None => times(time, once),
            Some(rounds) => (0..rounds).map(|_| once().map(|time| time.as_secs_f64() * 1e6)).collect(),
        }
    };
    if threads == 1 {
        return Ok(best_and_median(copy(None)?).1);
    }
    let alone = memcpy(bytes, 1, Duration::ZERO)?;
    let rounds = (time.as_secs_f64() * 1e6 / alone.max(0.1) / threads as f64) as usize;
    let rounds = rounds.clamp(5, 5000);
    let times = thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(|| copy(Some(rounds)))).collect();
        let times = copy(Some(rounds));
        drop(others);
        times
    })?;
    Ok(best_and_median(times).1)
}

fn stream(
    bytes: usize,
    mut near: impl Read,
    mut far: impl Write + Send,
    time: Duration,
) -> Result<f64, Error> {
    let (go, gone) = channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            let data = vec![1_u8; bytes];
            // Ends with the reader, which has the error if there is one.
            while gone.recv().is_ok() && far.write_all(&data).is_ok() {}
        });
        let mut into = vec![2_u8; bytes];
        let measured = times(time, || {
            let start = Instant::now();
            go.send(()).map_err(Error::other)?;
            near.read_exact(&mut into)?;
            Ok(start.elapsed())
        });
        drop(go);
        Ok(best_and_median(measured?).1)
    })
}
