//! The loop's end of the streams to agents and workers.

use reknit_engine::JobName;
use reknit_layout::{NodeName, WorkerKey};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::{mpsc, oneshot};
use tonic::Status;

/// Who is at the other end.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Peer {
    Agent(NodeName),
    Worker(JobName, WorkerKey),
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Agent(node) => write!(f, "agent of {node}"),
            Self::Worker(job, worker) => write!(f, "worker {worker} of {job}"),
        }
    }
}

/// Tells the sessions of one peer apart: what an old one still says does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionId(u64);

/// Dropping it ends the stream.
#[derive(Debug)]
pub struct Session<O> {
    id: SessionId,
    orders: mpsc::Sender<Result<O, Status>>,
    _open: oneshot::Sender<Infallible>,
}

/// The stream's end of a session.
#[derive(Debug)]
pub struct StreamEnd<O> {
    pub id: SessionId,
    pub orders: mpsc::Receiver<Result<O, Status>>,
    /// Resolves when the loop has dropped the session.
    pub dropped: oneshot::Receiver<Infallible>,
    /// To end the stream with an error.
    pub failure: mpsc::WeakSender<Result<O, Status>>,
}

/// Both ends of a new session that holds up to `backlog` orders not yet taken.
pub fn session<O>(backlog: usize) -> (Session<O>, StreamEnd<O>) {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let id = SessionId(NEXT.fetch_add(1, Ordering::Relaxed));
    let (sender, orders) = mpsc::channel(backlog);
    let (open, dropped) = oneshot::channel();
    let failure = sender.downgrade();
    let session = Session { id, orders: sender, _open: open };
    let end = StreamEnd { id, orders, dropped, failure };
    (session, end)
}

impl<O> Session<O> {
    /// Ends a session that was not opened, and tells why.
    pub fn refuse(self, why: Status) {
        // The stream is new: there is room.
        let _ = self.orders.try_send(Err(why));
    }

    /// False when the peer does not take its orders.
    pub fn send(&self, order: O) -> bool {
        self.orders.try_send(Ok(order)).is_ok()
    }
}

/// What became of an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    Queued,
    /// There is no session: the peer reconciles when it opens one.
    NoSession,
    /// The peer did not take its orders, so its session was closed now.
    Closed,
}

/// Told to a session whose hello came after that of a later one.
pub const LATE: &str = "this process has opened a later connection already";

/// Which of its process's connections a session is. They are numbered as they are opened, and the hello of one that is
/// dead by now may arrive after that of a later one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Connection {
    /// Tells processes under one name apart.
    pub instance: String,
    pub number: u64,
}

/// The current session of every peer of one kind.
#[derive(Debug)]
pub struct Sessions<K, O> {
    open: BTreeMap<K, Session<O>>,
    /// Of every peer that was heard and is not forgotten.
    latest: BTreeMap<K, Connection>,
}

impl<K: Ord, O> Default for Sessions<K, O> {
    fn default() -> Self {
        Self { open: BTreeMap::new(), latest: BTreeMap::new() }
    }
}

impl<K: Ord + Clone, O> Sessions<K, O> {
    /// Its process has opened a later one already.
    pub fn is_late(&self, key: &K, connection: &Connection) -> bool {
        let latest = self.latest.get(key).filter(|latest| latest.instance == connection.instance);
        latest.is_some_and(|latest| latest.number > connection.number)
    }

    /// The peer's process has ended, or has been away for long: nothing that it sent is to be expected any more.
    pub fn forget(&mut self, key: &K) {
        self.latest.remove(key);
    }

    /// Ends the one before, if there is one, and tells it why.
    pub fn open(&mut self, key: K, session: Session<O>, connection: Connection) {
        self.latest.insert(key.clone(), connection);
        if let Some(before) = self.open.insert(key, session) {
            let why = "a newer session was opened under the same name";
            // When there is no room, the peer learns no more than that the stream ended.
            let _ = before.orders.try_send(Err(Status::aborted(why)));
        }
    }

    pub fn is_open(&self, key: &K) -> bool {
        self.open.contains_key(key)
    }

    pub fn is_current(&self, key: &K, id: SessionId) -> bool {
        self.open.get(key).is_some_and(|session| session.id == id)
    }

    /// False when `id` is not the current session.
    pub fn close(&mut self, key: &K, id: SessionId) -> bool {
        self.is_current(key, id) && self.open.remove(key).is_some()
    }

    /// Never waits.
    pub fn send(&mut self, key: &K, order: O) -> Sent {
        match self.open.get(key) {
            None => Sent::NoSession,
            Some(session) if session.send(order) => Sent::Queued,
            Some(_) => {
                self.open.remove(key);
                Sent::Closed
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection(instance: &str, number: u64) -> Connection {
        Connection { instance: instance.to_owned(), number }
    }

    #[test]
    fn a_new_session_replaces_the_old_one() {
        let mut sessions = Sessions::default();
        let (first, mut first_end) = session::<u32>(1);
        let (second, second_end) = session(1);
        sessions.open("a", first, connection("x", 1));
        sessions.open("a", second, connection("x", 2));
        assert!(first_end.dropped.try_recv().is_err());
        assert_eq!(first_end.orders.try_recv().unwrap().unwrap_err().code(), tonic::Code::Aborted);
        assert!(first_end.orders.is_closed());
        assert!(!sessions.close(&"a", first_end.id));
        assert!(sessions.is_current(&"a", second_end.id));
        assert!(sessions.close(&"a", second_end.id));
    }

    #[test]
    fn an_earlier_connection_of_the_same_process_comes_too_late() {
        let mut sessions = Sessions::default();
        let (one, end) = session::<u32>(1);
        sessions.open("a", one, connection("x", 5));
        let late = |sessions: &Sessions<&str, u32>, instance, number| {
            sessions.is_late(&"a", &connection(instance, number))
        };
        assert!(late(&sessions, "x", 4) && !late(&sessions, "x", 6));
        assert!(!late(&sessions, "y", 1), "another process counts anew");
        assert!(sessions.close(&"a", end.id));
        assert!(late(&sessions, "x", 4), "also when the later one has ended");
        sessions.forget(&"a");
        assert!(!late(&sessions, "x", 4));
    }

    #[test]
    fn a_peer_that_takes_no_orders_is_closed() {
        let mut sessions = Sessions::default();
        let (one, end) = session(2);
        sessions.open("a", one, connection("x", 1));
        assert_eq!(sessions.send(&"a", 1), Sent::Queued);
        assert_eq!(sessions.send(&"a", 2), Sent::Queued);
        assert_eq!(sessions.send(&"a", 3), Sent::Closed);
        assert_eq!(sessions.send(&"a", 4), Sent::NoSession);
        assert!(!sessions.is_current(&"a", end.id));
    }
}
