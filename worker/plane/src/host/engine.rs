//! The one thread of a plane that moves the data of every group that nobody drives.

use super::hub::{Hub, WAKE, timespec};
use super::life::Life;
use super::room::State;
use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

/// Events taken per call.
const EVENTS: usize = 64;

#[derive(Debug)]
pub(super) struct Engine {
    hub: Arc<Hub>,
    /// Groups with something to do at once.
    busy: BTreeSet<u64>,
    stopping: bool,
    /// Ends with this thread, if there is one.
    life: Option<Arc<Life>>,
}

impl Engine {
    pub(super) fn new(hub: &Arc<Hub>, life: Option<&Arc<Life>>) -> Engine {
        Engine { hub: Arc::clone(hub), busy: BTreeSet::new(), stopping: false, life: life.cloned() }
    }

    /// Tells `alive` once its signs of life are there.
    pub(super) fn run(mut self, alive: &Sender<()>) {
        let life = self.life.take();
        // Failing that, peers wait for signs that never change, and see the end of the sockets.
        let _tie = life.as_ref().map(|life| life.tie());
        let _nobody_waits = alive.send(());
        let mut events = Vec::with_capacity(EVENTS);
        while !(self.stopping && self.hub.rooms().is_empty()) {
            let patience =
                if self.busy.is_empty() { self.hub.patience(Instant::now()) } else { Some(Duration::ZERO) };
            events.clear();
            match epoll::wait(&self.hub.epoll, spare_capacity(&mut events), patience.map(timespec).as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                // The descriptors are this plane's own: only a lack of kernel memory is left.
                Err(_) => break,
            }
            for event in &events {
                match event.data.u64() {
                    WAKE => self.hub.hush(),
                    id => {
                        self.busy.insert(id);
                    }
                }
            }
            if self.hub.stopping() && !self.stopping {
                self.stopping = true;
                for room in self.hub.rooms() {
                    room.close_soon(Instant::now());
                    self.busy.insert(room.shared.id);
                }
            }
            self.look_at_deadlines(Instant::now());
            for id in std::mem::take(&mut self.busy) {
                self.serve(id);
            }
        }
        for room in self.hub.end().into_values() {
            room.end();
        }
    }

    fn look_at_deadlines(&mut self, now: Instant) {
        if !self.hub.alarmed(now) {
            return;
        }
        for room in self.hub.rooms() {
            match room.next_deadline() {
                Some(deadline) if deadline <= now => {
                    self.busy.insert(room.shared.id);
                }
                Some(deadline) => self.hub.alarm(deadline),
                None => {}
            }
        }
    }

    fn serve(&mut self, id: u64) {
        let Some(room) = self.hub.room(id) else {
            return;
        };
        match room.serve() {
            State::Idle => {}
            State::More => {
                self.busy.insert(id);
            }
            State::Over => self.hub.close(id),
        }
    }
}
