//! The signals that ask the demo to end.

use crate::failure::Failure;
use tokio::signal::unix::{Signal, SignalKind, signal};

#[derive(Debug)]
pub(crate) struct Interrupts {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
}

impl Interrupts {
    pub(crate) fn listen() -> Result<Self, Failure> {
        let on = |kind| signal(kind).map_err(Failure::failed("signals cannot be watched"));
        Ok(Self {
            interrupt: on(SignalKind::interrupt())?,
            terminate: on(SignalKind::terminate())?,
            hangup: on(SignalKind::hangup())?,
        })
    }

    pub(crate) async fn next(&mut self) -> Failure {
        tokio::select! {
            _ = self.interrupt.recv() => Failure::Interrupted { name: "Ctrl-C", number: 2 },
            _ = self.terminate.recv() => Failure::Interrupted { name: "SIGTERM", number: 15 },
            _ = self.hangup.recv() => Failure::Interrupted { name: "SIGHUP", number: 1 },
        }
    }
}
