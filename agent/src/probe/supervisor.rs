//! The supervisor as the probe sees it: the other end of the socket that is the probe's standard input.

use super::protocol::{ProbeLine, ProbeOrder};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tracing::warn;

/// A supervisor that takes no line for so long is stuck; it will start another probe.
const WRITE_LIMIT: Duration = Duration::from_secs(10);
/// No order is nearly as long.
const ORDER_LIMIT: u64 = 1 << 20;

/// Where lines go. All threads share it.
#[derive(Debug)]
pub(super) struct Supervisor {
    socket: Mutex<UnixStream>,
}

/// Where orders come from.
#[derive(Debug)]
pub(super) struct Orders {
    socket: BufReader<UnixStream>,
}

/// Takes over standard input.
pub(super) fn connect() -> io::Result<(Supervisor, Orders)> {
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    socket.set_write_timeout(Some(WRITE_LIMIT))?;
    let orders = Orders { socket: BufReader::new(socket.try_clone()?) };
    Ok((Supervisor { socket: Mutex::new(socket) }, orders))
}

impl Supervisor {
    /// Writes a whole line. When the supervisor is gone the probe ends.
    pub(super) fn say(&self, line: &ProbeLine) {
        let Ok(mut text) = serde_json::to_vec(line) else {
            return;
        };
        text.push(b'\n');
        let mut socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        if socket.write_all(&text).is_err() {
            super::end();
        }
    }
}

impl Orders {
    /// The next order; what is none is passed over. `None` when the supervisor is gone.
    pub(super) fn next(&mut self) -> Option<ProbeOrder> {
        loop {
            let mut line = Vec::new();
            let read = self.socket.by_ref().take(ORDER_LIMIT).read_until(b'\n', &mut line);
            match read {
                Ok(1..) if line.ends_with(b"\n") => match serde_json::from_slice(&line) {
                    Ok(order) => return Some(order),
                    Err(error) => warn!(%error, "the supervisor's order is not understood"),
                },
                Ok(_) => return None,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return None,
            }
        }
    }
}
