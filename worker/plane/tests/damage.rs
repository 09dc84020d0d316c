//! A bit that changes on its way between two sockets is an error, and never another number.

#![allow(clippy::unwrap_used)]

mod common;

use common::{PATIENCE, spec};
use reknit_plane::{Buffer, Endpoint, HostPlane, Op, Plane, PlaneError, Transport};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::thread;

const HEADER: usize = 48;
const VALUES: usize = 40;
const MESSAGE: usize = HEADER + VALUES * size_of::<f32>();
/// What rank 0 says first: its answer to a hello, and on one node what it offers to share, which is nothing.
const ANSWER: usize = 65;
const OFFER: usize = 24;

trait Stream: Read + Write + Send + Sized + 'static {
    fn again(&self) -> Self;
    fn end(&self, how: Shutdown);
}

impl Stream for TcpStream {
    fn again(&self) -> Self {
        self.try_clone().unwrap()
    }

    fn end(&self, how: Shutdown) {
        let _ = self.shutdown(how);
    }
}

impl Stream for UnixStream {
    fn again(&self) -> Self {
        self.try_clone().unwrap()
    }

    fn end(&self, how: Shutdown) {
        let _ = self.shutdown(how);
    }
}

/// Passes on what comes. Bit `flip` of it, if any, is another one then. True when it was.
fn pass<S: Stream>(mut from: S, mut to: S, flip: Option<usize>) -> bool {
    let (mut at, mut flipped) = (0, false);
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        if let Some(bit) = flip.filter(|bit| (at..at + count).contains(&(bit / 8))) {
            bytes[bit / 8 - at] ^= 1 << (bit % 8);
            flipped = true;
        }
        at += count;
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    to.end(Shutdown::Write);
    from.end(Shutdown::Read);
    flipped
}

/// Stands between rank 1, which has called `near`, and rank 0.
fn between<S: Stream>(near: S, zero: S, flip: Option<usize>) -> bool {
    let (back, onward) = (near.again(), zero.again());
    let calls = thread::spawn(move || pass(near, zero, None));
    let flipped = pass(onward, back, flip);
    calls.join().unwrap();
    flipped
}

/// Rank 0 sends numbers to rank 1, and a bit of the message changes. What rank 1 makes of it.
fn send(transport: Transport, flip: Option<usize>) -> Result<Vec<f32>, PlaneError> {
    let planes = [(); 2].map(|()| HostPlane::over(transport, "node", "127.0.0.1").unwrap());
    let members: Vec<Endpoint> = planes.iter().map(Plane::endpoint).collect();
    let mut seen = members.clone();
    let (tcp, zero) = (TcpListener::bind("127.0.0.1:0").unwrap(), members[0].clone());
    seen[0].tcp = tcp.local_addr().unwrap().to_string();
    seen[0].unix = format!("{}-between", zero.unix);
    let unix = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&seen[0].unix).unwrap()).unwrap();
    let proxy = thread::spawn(move || match transport {
        Transport::Tcp => {
            let flip = flip.map(|bit| ANSWER * 8 + bit);
            between(tcp.accept().unwrap().0, TcpStream::connect(zero.tcp).unwrap(), flip)
        }
        Transport::Unix | Transport::Shared => {
            let flip = flip.map(|bit| (ANSWER + OFFER) * 8 + bit);
            let address = SocketAddr::from_abstract_name(&zero.unix).unwrap();
            between(unix.accept().unwrap().0, UnixStream::connect_addr(&address).unwrap(), flip)
        }
    });
    let join = |rank: usize, members: &[Endpoint]| planes[rank].join(spec(members, rank));
    let came = thread::scope(|scope| {
        scope.spawn(|| {
            let mut group = join(0, &members).unwrap();
            let buffer = Buffer::F32(numbers());
            // It may have been told of the damage before it sees that all has left.
            let _ = group.submit(Op::Send { to: 1, buffer }, PATIENCE).wait();
            group.retire();
        });
        let mut group = join(1, &seen).unwrap();
        let buffer = Buffer::F32(vec![0.0; VALUES]);
        let came = group.submit(Op::Recv { from: 0, buffer }, PATIENCE).wait();
        group.retire();
        came
    });
    drop(planes);
    assert_eq!(proxy.join().unwrap(), flip.is_some(), "the bit was to change");
    came.map(|buffer| match buffer {
        Buffer::F32(values) => values,
        other => panic!("{other:?}"),
    })
}

fn numbers() -> Vec<f32> {
    (0..VALUES).map(|at| at as f32 + 0.5).collect()
}

/// Every byte of the header and the payload, each time another bit of it.
#[test]
fn a_changed_bit_is_an_error_of_its_sender() {
    for transport in [Transport::Tcp, Transport::Unix] {
        assert_eq!(send(transport, None).unwrap(), numbers());
        for byte in 0..MESSAGE {
            let bit = byte * 8 + byte % 8;
            match send(transport, Some(bit)) {
                Err(PlaneError::PeerLost { rank: 0, detail, .. }) => {
                    assert!(
                        detail.contains("damaged") || detail.contains("not a frame"),
                        "bit {bit}: {detail}"
                    );
                }
                other => panic!("{transport:?}, bit {bit} of the message: {other:?}"),
            }
        }
    }
}
