//! Strangers and ranks gone mad that know the protocol.

use super::handshake::{ANSWER, Hello, NONCE, PROOF, Side};
use super::offer::Answer;
use super::ring::{CAPACITY, Ring};
use super::window::{NoWindow, OwnWindow, PeerWindow, Word};
use super::*;
use crate::{Buffer, Lent, Op, Ticket};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::thread;

const PATIENCE: Duration = Duration::from_secs(30);
const TICKET: Ticket = Ticket([1; 32]);

fn open() -> HostPlane {
    HostPlane::new("node", "127.0.0.1").unwrap()
}

fn spec(members: &[Endpoint], rank: usize) -> GroupSpec {
    GroupSpec {
        job: "job".into(),
        epoch: 1,
        name: "world".into(),
        members: members.to_vec(),
        rank,
        ticket: TICKET,
        deadline: PATIENCE,
    }
}

fn hello() -> Hello {
    Hello {
        key: Key { job: "job".into(), epoch: 1, group: "world".into() },
        from: 1,
        to: 0,
        nonce: [0; NONCE],
    }
}

/// A connection that says it is rank 1.
fn claim(zero: &Endpoint) -> UnixStream {
    let address = SocketAddr::from_abstract_name(&zero.unix).unwrap();
    let mut stranger = UnixStream::connect_addr(&address).unwrap();
    stranger.set_read_timeout(Some(PATIENCE)).unwrap();
    stranger.write_all(&hello().encode()).unwrap();
    stranger
}

/// A connection that proves that it is rank 1.
fn prove(zero: &Endpoint) -> UnixStream {
    let mut rank = claim(zero);
    let mut answer = [0; ANSWER];
    rank.read_exact(&mut answer).unwrap();
    let nonce = answer[1..1 + NONCE].try_into().unwrap();
    rank.write_all(&hello().proof(&nonce, Side::Connecting, &TICKET)).unwrap();
    rank
}

/// Strangers that know the protocol and all names, but not the ticket, cannot take a rank or keep its owner out.
#[test]
fn a_false_proof_is_hung_up_on_and_a_missing_one_keeps_nobody_out() {
    let planes = [open(), open()];
    let members: Vec<Endpoint> = planes.iter().map(Plane::endpoint).collect();
    let join = |rank: usize| {
        let mut group = planes[rank].join(spec(&members, rank)).unwrap();
        group.submit(Op::Barrier, PATIENCE).wait().unwrap();
        group.retire();
    };
    thread::scope(|scope| {
        scope.spawn(|| join(0));
        let mut liar = claim(&members[0]);
        liar.read_exact(&mut [0; ANSWER]).unwrap();
        liar.write_all(&[0; PROOF]).unwrap();
        assert_eq!(liar.read(&mut [0; 1]).unwrap(), 0);
        let silent: Vec<UnixStream> = (0..100).map(|_| claim(&members[0])).collect();
        join(1);
        drop(silent);
    });
}

/// Rank 1 is `peer`, which has proven itself and goes on by itself. What rank 0 makes of it during an operation.
fn against(op: Op, peer: impl FnOnce(OwnedFd) + Send) -> PlaneError {
    let zero = open();
    let members = [zero.endpoint(), Endpoint { unix: "nobody".into(), ..zero.endpoint() }];
    thread::scope(|scope| {
        let members = &members;
        scope.spawn(move || {
            let rank = prove(&members[0]);
            rank.set_nonblocking(true).unwrap();
            peer(rank.into());
        });
        let mut group = match zero.join(spec(members, 0)) {
            Ok(group) => group,
            Err(error) => return error,
        };
        group.submit(op, PATIENCE).wait().unwrap_err()
    })
}

fn wait_for_end(socket: &OwnedFd) {
    let mut fds = [rustix::event::PollFd::new(socket, rustix::event::PollFlags::RDHUP)];
    rustix::event::poll(&mut fds, Some(&hub::timespec(PATIENCE))).unwrap();
}

/// Passes a window to rank 0 as it should be, and gets it back to write into it.
fn agree(socket: &OwnedFd) -> OwnWindow {
    let windows = Windows::new(true, None);
    let mut offered = windows.offer(socket).unwrap();
    let until = Instant::now() + PATIENCE;
    loop {
        match offered.answer(socket, &windows) {
            Answer::Agreed(Some(near)) => return near.ring.into_own_window(),
            Answer::Wait => assert!(Instant::now() < until),
            other => panic!("{other:?}"),
        }
        thread::yield_now();
    }
}

/// Hands out a window in order, and writes nonsense into its head afterwards.
fn nonsense(word: Word, value: u64) -> PlaneError {
    // More than fits into a ring at once.
    let buffer = Buffer::F32(vec![1.0; 1 << 20]);
    let op = match word {
        Word::Taken | Word::UntilTaken => Op::Send { to: 1, buffer },
        Word::Written | Word::UntilWritten => Op::Recv { from: 1, buffer },
    };
    against(op, move |socket| {
        let own = agree(&socket);
        own.set(word, value);
        // Rank 0 may sleep.
        rustix::net::send(&socket, &[0], rustix::net::SendFlags::NOSIGNAL).unwrap();
        wait_for_end(&socket);
    })
}

#[test]
fn a_window_full_of_nonsense_is_blamed_on_its_owner() {
    let numbers = [CAPACITY as u64 + 1, u64::MAX, u64::MAX - CAPACITY as u64, 1 << 63];
    for (word, value) in numbers.iter().flat_map(|value| [(Word::Written, value), (Word::Taken, value)]) {
        let error = nonsense(word, *value);
        let told =
            matches!(&error, PlaneError::PeerLost { rank: 1, detail, .. } if detail.contains("no sense"));
        assert!(told, "{word:?} {value}: {error}");
    }
}

#[test]
fn frames_of_nonsense_in_a_window_are_blamed_on_its_owner() {
    let op = Op::Recv { from: 1, buffer: Buffer::F32(vec![1.0; 1 << 20]) };
    let error = against(op, |socket| {
        let mut own = agree(&socket);
        own.put(0, &[0x5a; 4096]);
        own.set(Word::Written, 4096);
        rustix::net::send(&socket, &[0], rustix::net::SendFlags::NOSIGNAL).unwrap();
        wait_for_end(&socket);
    });
    assert!(
        matches!(&error, PlaneError::PeerLost { rank: 1, detail, .. } if detail.contains("not a frame")),
        "{error}"
    );
}

#[test]
fn an_offer_of_nonsense_fails_the_join() {
    let error = against(Op::Barrier, |socket| {
        rustix::net::send(&socket, &[0xff; offer::OFFER], rustix::net::SendFlags::NOSIGNAL).unwrap();
        wait_for_end(&socket);
    });
    assert!(matches!(&error, PlaneError::Handshake { detail, .. } if detail.contains("rank 1")), "{error}");
}

#[test]
fn a_window_that_could_be_truncated_is_refused() {
    let file = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, 4096 + CAPACITY as u64).unwrap();
    assert!(matches!(PeerWindow::open(&file, CAPACITY), Err(NoWindow::Unsealed)));
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    assert!(PeerWindow::open(&file, CAPACITY).is_ok());
    assert!(matches!(PeerWindow::open(&file, 2 * CAPACITY), Err(NoWindow::Size { .. })));
}

#[test]
fn who_gets_a_window_can_neither_write_nor_resize_it() {
    let (_own, file) = OwnWindow::create(CAPACITY).unwrap();
    assert!(ftruncate(&file, 0).is_err());
    assert!(rustix::io::write(&file, &[1]).is_err());
    let hole = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    assert!(rustix::fs::fallocate(&file, hole, 0, 4096).is_err());
    assert!(fcntl_add_seals(&file, SealFlags::WRITE).is_err());
}

/// Two rings that are each other's peer, and the sockets beside them.
fn pair() -> [(Ring, OwnedFd); 2] {
    let [(mine, my_file), (yours, your_file)] = [(); 2].map(|()| OwnWindow::create(CAPACITY).unwrap());
    let (near, far) = UnixStream::pair().unwrap();
    let peer = |file| PeerWindow::open(file, CAPACITY).unwrap();
    [(Ring::new(mine, peer(your_file)), near.into()), (Ring::new(yours, peer(my_file)), far.into())]
}

/// Lengths that meet the ring's end in every way; each side is checked against a plain copy.
#[test]
fn a_ring_gives_back_what_was_put_in() {
    let [(mut near, near_socket), (mut far, far_socket)] = pair();
    let bytes: Vec<u8> = (0..3 * CAPACITY).map(|at| (at ^ at >> 8 ^ at >> 16) as u8).collect();
    let (mut written, mut read) = (0, Vec::<u8>::new());
    let mut step = 1;
    while read.len() < bytes.len() {
        let end = bytes.len().min(written + step);
        written += near.write(&bytes[written..end], &near_socket).unwrap();
        let mut into = vec![0; step / 2 + 1];
        let count = far.read(&mut into, &far_socket).unwrap();
        read.extend(&into[..count]);
        step = step * 7 % 200_003;
    }
    assert!(read == bytes);
    assert_eq!(far.read(&mut [0; 8], &far_socket), Ok(0));
}

#[test]
fn a_full_ring_takes_nothing_until_something_is_taken_out() {
    let [(mut near, near_socket), (mut far, far_socket)] = pair();
    assert_eq!(near.write(&vec![1; CAPACITY + 1], &near_socket), Ok(CAPACITY));
    assert_eq!(near.write(&[1], &near_socket), Ok(0));
    assert_eq!(far.read(&mut [0; 5], &far_socket), Ok(5));
    assert_eq!(near.write(&[1; 9], &near_socket), Ok(5));
}

/// A byte over the socket wakes who sleeps; who does not gets none.
#[test]
fn who_sleeps_is_woken_once() {
    let [(mut near, near_socket), (mut far, far_socket)] = pair();
    let called = |socket: &OwnedFd| {
        let flags = rustix::net::RecvFlags::DONTWAIT;
        rustix::net::recv(socket, &mut [0; 64], flags).map_or(0, |(count, _)| count)
    };
    near.write(&[1; 10], &near_socket).unwrap();
    assert_eq!(called(&far_socket), 0, "it is awake");
    far.await_data();
    assert!(far.has_come(), "what has come before is seen");
    far.wake();
    far.read(&mut [0; 10], &far_socket).unwrap();
    far.await_data();
    assert!(!far.has_come());
    near.write(&[1], &near_socket).unwrap();
    near.write(&[1], &near_socket).unwrap();
    assert_eq!(called(&far_socket), 1, "for both");
    far.wake();
    near.write(&vec![1; CAPACITY], &near_socket).unwrap();
    near.await_room();
    assert!(!near.has_come());
    far.read(&mut [0; 100], &far_socket).unwrap();
    assert_eq!(called(&near_socket), 0, "that little is not worth it");
    far.read(&mut vec![0; CAPACITY / 2], &far_socket).unwrap();
    assert!(near.has_come());
    assert_eq!(called(&near_socket), 1);
}

/// Lends nothing but trouble.
struct Panics;

impl Lent for Panics {
    fn outgoing(&self, to: usize) -> usize {
        usize::from(to == 1)
    }

    fn incoming(&self, _from: usize) -> usize {
        0
    }

    fn send(&mut self, _to: usize, _at: usize) -> &[u8] {
        panic!("as a lender with a fault does")
    }

    fn receive(&mut self, _from: usize, _at: usize) -> &mut [u8] {
        &mut []
    }
}

#[test]
fn a_lender_that_panics_keeps_neither_its_peers_nor_its_plane() {
    let (one, other) = (open(), open());
    let members = [one.endpoint(), other.endpoint()];
    let (told, ended) = std::sync::mpsc::channel();
    thread::spawn(move || {
        thread::scope(|scope| {
            let (one, members) = (&one, &members);
            scope.spawn(move || {
                let mut group = one.join(spec(members, 0)).unwrap();
                let panics = || group.exchange(&mut Panics, PATIENCE);
                assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
            });
            let mut group = other.join(spec(members, 1)).unwrap();
            let buffer = Buffer::Bytes(vec![0; 8]);
            let error = group.submit(Op::Recv { from: 0, buffer }, PATIENCE).wait().unwrap_err();
            assert!(matches!(error, PlaneError::PeerLost { rank: 0, .. }), "{error}");
        });
        drop((one, other));
        told.send(()).unwrap();
    });
    ended.recv_timeout(PATIENCE / 2).unwrap();
}
