//! Joining a group: a rank connects to every lower one and is connected to by every higher one.

use super::handshake::{ACCEPTED, ANSWER, Hello, Key, NONCE, Nonce, PROOF, REFUSED, Refusal, Side};
use super::hub::timespec;
use super::link::Link;
use super::lobby::{Desk, NoDesk, Visitor};
use super::offer::{Answer, Offered, Windows};
use super::wire::Wire;
use crate::{AbortReason, GroupSpec, PlaneError, Ticket};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, send,
    socket_with, sockopt,
};
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// Between two tries to reach a peer that cannot answer just now.
const RETRY: Duration = Duration::from_millis(20);

/// Visitors that may owe a proof at once, beyond one per rank.
const MAX_CLAIMS: usize = 32;

/// A connection on its way to becoming a link.
#[derive(Debug)]
struct Candidate {
    peer: usize,
    socket: OwnedFd,
    hello: Hello,
    stage: Stage,
    heard: Vec<u8>,
}

#[derive(Debug)]
enum Stage {
    /// The connection is being made; then the hello goes out.
    Connecting,
    /// The hello is out.
    AwaitingAnswer,
    /// The answer, with this nonce, is out.
    AwaitingProof(Nonce),
    /// The peer is the right one; this rank's offer of a shared window is out.
    AwaitingOffer(Offered),
}

enum Progress {
    Wait(Candidate),
    Linked(usize, Wire),
    /// The peer cannot answer just now.
    Again(usize),
    /// The connection came to nothing; another may still come.
    Dropped,
}

pub(super) struct Join<'a> {
    spec: &'a GroupSpec,
    key: &'a Key,
    until: Instant,
    windows: &'a Windows,
    /// Not even ranks of this node are called over Unix sockets.
    tcp_only: bool,
    links: Vec<Option<Wire>>,
    candidates: Vec<Candidate>,
    /// Peers to call, and when.
    to_call: Vec<(Instant, usize)>,
    /// What kept a visitor out, for the message should the deadline pass.
    turned_away: Option<String>,
}

impl<'a> Join<'a> {
    pub(super) fn new(
        spec: &'a GroupSpec,
        key: &'a Key,
        until: Instant,
        windows: &'a Windows,
        tcp_only: bool,
    ) -> Join<'a> {
        let now = Instant::now();
        Join {
            spec,
            key,
            until,
            windows,
            tcp_only,
            links: (0..spec.members.len()).map(|_| None).collect(),
            candidates: Vec::new(),
            to_call: (0..spec.rank).map(|peer| (now, peer)).collect(),
            turned_away: None,
        }
    }

    /// Blocks until all members are linked.
    pub(super) fn run(mut self, desk: &Desk<'_>) -> Result<Vec<Option<Link>>, PlaneError> {
        while !self.missing().is_empty() {
            for visitor in desk.visitors().map_err(|why| self.no_desk(why))? {
                self.receive(visitor)?;
            }
            self.call()?;
            let now = Instant::now();
            if now >= self.until {
                return Err(self.late());
            }
            let ready = self.poll(desk, now)?;
            for (candidate, ready) in std::mem::take(&mut self.candidates).into_iter().zip(ready) {
                let progress = if ready { self.advance(candidate)? } else { Progress::Wait(candidate) };
                self.settle(progress);
            }
        }
        let epoch = self.key.epoch;
        let links = self.links.into_iter();
        Ok(links.map(|wire| Some(Link::new(wire?, epoch))).collect())
    }

    fn missing(&self) -> Vec<usize> {
        (0..self.links.len()).filter(|&peer| peer != self.spec.rank && self.links[peer].is_none()).collect()
    }

    /// Waits for any connection to move. Says which candidates did. A member that leaves before all are there ends the
    /// join, since the group can never be whole.
    fn poll(&mut self, desk: &Desk<'_>, now: Instant) -> Result<Vec<bool>, PlaneError> {
        let mut fds: Vec<PollFd<'_>> = self
            .candidates
            .iter()
            .map(|candidate| {
                let flags = match &candidate.stage {
                    Stage::Connecting => PollFlags::OUT,
                    Stage::AwaitingAnswer | Stage::AwaitingProof(_) | Stage::AwaitingOffer(_) => {
                        PollFlags::IN
                    }
                };
                PollFd::new(&candidate.socket, flags)
            })
            .collect();
        fds.push(PollFd::new(&*desk.bell, PollFlags::IN));
        let linked: Vec<usize> = (0..self.links.len()).filter(|&r| self.links[r].is_some()).collect();
        for wire in self.links.iter().flatten() {
            fds.push(PollFd::new(wire.socket(), PollFlags::RDHUP));
        }
        let next_call = self.to_call.iter().map(|(at, _)| *at).min();
        let next = next_call.map_or(self.until, |at| at.min(self.until));
        let timeout = timespec(next.saturating_duration_since(now));
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(self.io(format!("cannot wait for the peers: {errno}"))),
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let gone = ready[self.candidates.len() + 1..].iter().position(|&gone| gone);
        if let Some(peer) = gone.map(|at| linked[at]) {
            return Err(self.left(peer));
        }
        Ok(ready[..self.candidates.len()].to_vec())
    }

    /// A linked peer has hung up; it may have said why.
    fn left(&mut self, peer: usize) -> PlaneError {
        let wire = self.links[peer].take();
        let said = wire.map(|wire| Link::new(wire, self.key.epoch).peek());
        match said {
            Some(Err(error)) => error.blame(&self.key.group, self.spec.rank, peer),
            Some(Ok(_)) | None => self.lost(peer, "it left while others were still joining"),
        }
    }

    fn settle(&mut self, progress: Progress) {
        match progress {
            Progress::Wait(candidate) => self.candidates.push(candidate),
            Progress::Linked(peer, wire) => {
                if self.links[peer].is_none() {
                    self.links[peer] = Some(wire);
                }
            }
            Progress::Again(peer) => self.to_call.push((Instant::now() + RETRY, peer)),
            Progress::Dropped => {}
        }
    }

    /// Answers a visitor, who may still turn out to be a stranger.
    fn receive(&mut self, visitor: Visitor) -> Result<(), PlaneError> {
        let (from, to) = (visitor.hello.from as usize, visitor.hello.to as usize);
        let expected = to == self.spec.rank && from > to && from < self.links.len();
        if !expected || self.links[from].is_some() {
            visitor.refuse(Refusal::WrongRank);
            self.turned_away = Some(format!("rank {from} asked for rank {to}"));
            return Ok(());
        }
        // Anybody can claim a rank; so several may, until one of them proves it. Who has had the most time goes first.
        let proving = |candidate: &Candidate| matches!(&candidate.stage, Stage::AwaitingProof(_));
        if self.candidates.iter().filter(|c| proving(c)).count() >= MAX_CLAIMS + self.links.len()
            && let Some(oldest) = self.candidates.iter().position(proving)
        {
            self.candidates.remove(oldest);
        }
        let nonce = self.nonce()?;
        let proof = visitor.hello.proof(&nonce, Side::Accepting, &self.spec.ticket);
        let mut answer = vec![ACCEPTED];
        answer.extend(nonce);
        answer.extend(proof);
        if say(&visitor.socket, &answer) {
            self.candidates.push(Candidate {
                peer: from,
                socket: visitor.socket,
                hello: visitor.hello,
                stage: Stage::AwaitingProof(nonce),
                heard: Vec::new(),
            });
        }
        Ok(())
    }

    /// Calls the lower ranks whose turn it is.
    fn call(&mut self) -> Result<(), PlaneError> {
        let now = Instant::now();
        let (due, later): (Vec<_>, Vec<_>) = self.to_call.drain(..).partition(|(at, _)| *at <= now);
        self.to_call = later;
        for (_, peer) in due {
            let nonce = self.nonce()?;
            let progress = match self.dial(peer) {
                Ok(socket) => Progress::Wait(Candidate {
                    peer,
                    socket,
                    hello: Hello {
                        key: self.key.clone(),
                        from: self.spec.rank as u32,
                        to: peer as u32,
                        nonce,
                    },
                    stage: Stage::Connecting,
                    heard: Vec::new(),
                }),
                Err(Dial::Address(detail)) => return Err(self.io(detail)),
                Err(Dial::Errno(errno)) => self.unreachable(peer, errno)?,
            };
            self.settle(progress);
        }
        Ok(())
    }

    fn dial(&self, peer: usize) -> Result<OwnedFd, Dial> {
        let there = &self.spec.members[peer];
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let open = |family| socket_with(family, SocketType::STREAM, flags, None);
        let (socket, called) = if self.same_node(peer) && !self.tcp_only {
            let socket = open(AddressFamily::UNIX)?;
            let called = connect(&socket, &SocketAddrUnix::new_abstract_name(there.unix.as_bytes())?);
            (socket, called)
        } else {
            let address = resolve(&there.tcp).map_err(Dial::Address)?;
            let socket = open(match address {
                SocketAddr::V4(_) => AddressFamily::INET,
                SocketAddr::V6(_) => AddressFamily::INET6,
            })?;
            let called = connect(&socket, &address);
            (socket, called)
        };
        match called {
            Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(socket),
            Err(errno) => Err(errno.into()),
        }
    }

    /// A plane listens for as long as it lives: who refuses is gone. Everything else may pass.
    fn unreachable(&self, peer: usize, errno: Errno) -> Result<Progress, PlaneError> {
        let there = &self.spec.members[peer];
        match errno {
            Errno::CONNREFUSED | Errno::CONNRESET | Errno::PIPE => {
                Err(self.lost(peer, &format!("nobody listens at {} or {}: {errno}", there.unix, there.tcp)))
            }
            _ => Ok(Progress::Again(peer)),
        }
    }

    fn advance(&mut self, mut candidate: Candidate) -> Result<Progress, PlaneError> {
        let peer = candidate.peer;
        match &mut candidate.stage {
            Stage::Connecting => match sockopt::socket_error(&candidate.socket) {
                Ok(Ok(())) => {
                    if !say(&candidate.socket, &candidate.hello.encode()) {
                        return Ok(Progress::Again(peer));
                    }
                    candidate.stage = Stage::AwaitingAnswer;
                    Ok(Progress::Wait(candidate))
                }
                Ok(Err(errno)) | Err(errno) => self.unreachable(peer, errno),
            },
            Stage::AwaitingAnswer => {
                let wanted = match candidate.heard.first() {
                    None => 1,
                    Some(&REFUSED) => 2,
                    Some(&ACCEPTED) => ANSWER,
                    Some(_) => {
                        return Err(self.refused(format!("rank {peer} gave no answer that makes sense")));
                    }
                };
                match candidate.hear(wanted) {
                    // Its lobby may have been too full; if it is gone, the next call is refused.
                    Heard::End if candidate.heard.is_empty() => Ok(Progress::Again(peer)),
                    Heard::End => Err(self.lost(peer, "it closed the connection during the handshake")),
                    Heard::Wait => Ok(Progress::Wait(candidate)),
                    Heard::Some if wanted == 1 => self.advance(candidate),
                    Heard::Some => self.answered(candidate),
                }
            }
            Stage::AwaitingProof(nonce) => {
                let nonce = *nonce;
                match candidate.hear(PROOF) {
                    Heard::Wait => Ok(Progress::Wait(candidate)),
                    Heard::End => {
                        self.turned_away = Some(format!("who claimed to be rank {peer} gave no proof"));
                        Ok(Progress::Dropped)
                    }
                    Heard::Some if candidate.proves(&nonce, Side::Connecting, &self.spec.ticket) => {
                        self.trust(candidate)
                    }
                    Heard::Some => {
                        self.turned_away =
                            Some(format!("who claimed to be rank {peer} does not hold the ticket"));
                        Ok(Progress::Dropped)
                    }
                }
            }
            Stage::AwaitingOffer(offered) => match offered.answer(&candidate.socket, self.windows) {
                Answer::Wait => Ok(Progress::Wait(candidate)),
                Answer::End => Err(self.lost(peer, "it closed the connection during the handshake")),
                Answer::Bad(detail) => Err(self.refused(format!("rank {peer}: {detail}"))),
                Answer::Agreed(near) => Ok(Progress::Linked(peer, Wire::new(candidate.socket, near))),
            },
        }
    }

    /// Both sides have proven themselves. Over TCP that is all; on one node they may share memory.
    fn trust(&self, mut candidate: Candidate) -> Result<Progress, PlaneError> {
        let peer = candidate.peer;
        if sockopt::socket_domain(&candidate.socket) != Ok(AddressFamily::UNIX) {
            // Small messages go at once. Only speed depends on it.
            let _ = sockopt::set_tcp_nodelay(&candidate.socket, true);
            return Ok(Progress::Linked(peer, Wire::new(candidate.socket, None)));
        }
        match self.windows.offer(&candidate.socket) {
            Some(offered) => {
                candidate.stage = Stage::AwaitingOffer(offered);
                Ok(Progress::Wait(candidate))
            }
            None => Err(self.lost(peer, "it closed the connection during the handshake")),
        }
    }

    fn answered(&self, candidate: Candidate) -> Result<Progress, PlaneError> {
        let peer = candidate.peer;
        if candidate.heard[0] == REFUSED {
            return match Refusal::decode(candidate.heard[1]) {
                Refusal::NotYet => Ok(Progress::Again(peer)),
                Refusal::EpochClosed => {
                    Err(self.refused(format!("epoch {} is closed for rank {peer}", self.key.epoch)))
                }
                Refusal::WrongRank => Err(self.refused(format!(
                    "rank {peer} does not expect rank {}; all members must be given the same list",
                    self.spec.rank
                ))),
            };
        }
        let mut nonce = [0; NONCE];
        nonce.copy_from_slice(&candidate.heard[1..1 + NONCE]);
        let (hello, ticket) = (&candidate.hello, &self.spec.ticket);
        if !hello.verify(&nonce, Side::Accepting, ticket, &candidate.heard[1 + NONCE..]) {
            return Err(self.refused(format!("rank {peer} does not hold this rank's ticket")));
        }
        if !say(&candidate.socket, &hello.proof(&nonce, Side::Connecting, ticket)) {
            return Err(self.lost(peer, "it closed the connection during the handshake"));
        }
        self.trust(candidate)
    }

    fn same_node(&self, peer: usize) -> bool {
        self.spec.members[peer].node == self.spec.members[self.spec.rank].node
    }

    fn nonce(&self) -> Result<Nonce, PlaneError> {
        let mut nonce = [0; NONCE];
        getrandom::fill(&mut nonce).map_err(|error| self.io(format!("no random numbers: {error}")))?;
        Ok(nonce)
    }

    pub(super) fn no_desk(&self, why: NoDesk) -> PlaneError {
        no_desk(self.spec, why)
    }

    fn late(&self) -> PlaneError {
        let what = match &self.turned_away {
            Some(why) => format!("join (turned away: {why})"),
            None => "join".into(),
        };
        PlaneError::Deadline {
            group: self.key.group.clone(),
            what,
            after: self.spec.deadline,
            waiting_for: self.missing(),
        }
    }

    fn lost(&self, rank: usize, detail: &str) -> PlaneError {
        PlaneError::PeerLost { group: self.key.group.clone(), rank, detail: detail.into() }
    }

    fn refused(&self, detail: String) -> PlaneError {
        PlaneError::Handshake { group: self.key.group.clone(), detail }
    }

    fn io(&self, detail: String) -> PlaneError {
        PlaneError::Io { group: self.key.group.clone(), detail }
    }
}

pub(super) fn no_desk(spec: &GroupSpec, why: NoDesk) -> PlaneError {
    let group = spec.name.clone();
    match why {
        NoDesk::EpochClosed => PlaneError::Aborted { group, reason: AbortReason::EpochClosed },
        NoDesk::Stopping => PlaneError::Aborted { group, reason: AbortReason::Leaving },
        NoDesk::Taken => {
            PlaneError::Handshake { group, detail: "this plane is joining the group already".into() }
        }
    }
}

enum Dial {
    Address(String),
    Errno(Errno),
}

impl From<Errno> for Dial {
    fn from(errno: Errno) -> Self {
        Dial::Errno(errno)
    }
}

enum Heard {
    Some,
    Wait,
    End,
}

impl Candidate {
    /// Reads up to `wanted` bytes in all, never more: what follows belongs to the link.
    fn hear(&mut self, wanted: usize) -> Heard {
        while self.heard.len() < wanted {
            let mut bytes = [0; ANSWER];
            let room = &mut bytes[..wanted - self.heard.len()];
            match recv(&self.socket, room, RecvFlags::empty()) {
                Ok((0, _)) => return Heard::End,
                Ok((count, _)) => self.heard.extend(&bytes[..count]),
                Err(Errno::AGAIN) => return Heard::Wait,
                Err(Errno::INTR) => {}
                Err(_) => return Heard::End,
            }
        }
        Heard::Some
    }

    fn proves(&self, nonce: &Nonce, side: Side, ticket: &Ticket) -> bool {
        self.hello.verify(nonce, side, ticket, &self.heard)
    }
}

/// Handshake messages are short: a socket that cannot take one at once is of no use.
fn say(socket: &OwnedFd, bytes: &[u8]) -> bool {
    matches!(send(socket, bytes, SendFlags::NOSIGNAL), Ok(count) if count == bytes.len())
}

fn resolve(address: &str) -> Result<SocketAddr, String> {
    if let Ok(address) = address.parse() {
        return Ok(address);
    }
    let found = address.to_socket_addrs().ok().and_then(|mut found| found.next());
    found.ok_or_else(|| format!("cannot resolve the peer's address {address:?}; it must be host:port"))
}
