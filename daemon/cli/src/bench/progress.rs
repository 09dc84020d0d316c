//! What a command that takes long says on stderr meanwhile.

use std::io::{IsTerminal, Write};

/// One line that is written over, if someone watches. It is gone when this is dropped.
pub(super) struct Progress {
    watched: bool,
}

impl Progress {
    pub(super) fn start() -> Self {
        Self { watched: std::io::stderr().is_terminal() }
    }

    pub(super) fn tell(&self, what: &str) {
        if self.watched {
            let mut out = std::io::stderr().lock();
            let _ = write!(out, "\r\x1b[K{what}").and_then(|()| out.flush());
        }
    }

    /// A line that stays, whoever watches.
    pub(super) fn note(&self, what: &str) {
        self.tell("");
        let _ = writeln!(std::io::stderr(), "{what}");
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.tell("");
    }
}
