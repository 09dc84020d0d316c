//! Who does not belong to a group is kept out, and keeps nobody else out.

#![allow(clippy::unwrap_used)]

mod common;

use common::{PATIENCE, spec};
use reknit_plane::{Endpoint, Group, GroupSpec, HostPlane, Op, Plane, PlaneError, Ticket, Transport};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::thread;
use std::time::Duration;

fn plane() -> HostPlane {
    HostPlane::new("node", "127.0.0.1").unwrap()
}

/// Rank 0 waits for its join while `meanwhile` happens to it; then the right rank 1 comes, and both work.
fn join_works_in_spite_of(meanwhile: impl FnOnce(&HostPlane, &[Endpoint])) {
    let (zero, one) = (plane(), plane());
    let members = [zero.endpoint(), one.endpoint()];
    let barrier = |mut group: Box<dyn Group>| {
        group.submit(Op::Barrier, PATIENCE).wait().unwrap();
        group.retire();
    };
    thread::scope(|scope| {
        scope.spawn(|| barrier(zero.join(spec(&members, 0)).unwrap()));
        meanwhile(&zero, &members);
        barrier(one.join(spec(&members, 1)).unwrap());
    });
}

fn refused(error: &PlaneError) -> bool {
    matches!(error, PlaneError::Handshake { .. })
}

#[test]
fn a_wrong_ticket_is_refused() {
    join_works_in_spite_of(|_, members| {
        let mut wrong = spec(members, 1);
        wrong.ticket = Ticket([5; 32]);
        assert!(!format!("{wrong:?}").contains("5, 5"), "the ticket is not shown");
        let error = plane().join(wrong).unwrap_err();
        assert!(refused(&error), "{error}");
    });
}

#[test]
fn a_wrong_rank_is_refused() {
    join_works_in_spite_of(|_, members| {
        let third = plane();
        // Rank 2 of a group that rank 0 takes for one of two.
        let longer = [members[0].clone(), members[0].clone(), third.endpoint()];
        let error = third.join(spec(&longer, 2)).unwrap_err();
        assert!(refused(&error), "{error}");
    });
}

#[test]
fn an_old_epoch_is_refused() {
    join_works_in_spite_of(|zero, members| {
        zero.abort_joins(3);
        let mut old = spec(members, 1);
        old.epoch = 3;
        let error = plane().join(old).unwrap_err();
        assert!(refused(&error), "{error}");
        assert!(error.to_string().contains("epoch 3"), "{error}");
    });
}

/// Another job's or epoch's rank waits for a join that never comes, and disturbs nobody.
#[test]
fn another_job_or_a_future_epoch_waits_apart() {
    let changes: [fn(&mut GroupSpec); 2] = [|spec| spec.job.push('x'), |spec| spec.epoch += 1];
    for change in changes {
        join_works_in_spite_of(|_, members| {
            let mut other = spec(members, 1);
            change(&mut other);
            other.deadline = Duration::from_millis(50);
            let error = plane().join(other).unwrap_err();
            assert!(
                matches!(&error, PlaneError::Deadline { waiting_for, .. } if *waiting_for == [0]),
                "{error}"
            );
        });
    }
}

fn dial_unix(endpoint: &Endpoint) -> UnixStream {
    UnixStream::connect_addr(&SocketAddr::from_abstract_name(&endpoint.unix).unwrap()).unwrap()
}

#[test]
fn garbage_is_hung_up_on() {
    join_works_in_spite_of(|zero, _| {
        let endpoint = zero.endpoint();
        let mut tcp = TcpStream::connect(&endpoint.tcp).unwrap();
        tcp.set_read_timeout(Some(PATIENCE)).unwrap();
        tcp.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        // Either an orderly end or a reset, since not all of it was read.
        assert!(matches!(tcp.read(&mut [0; 16]), Ok(0) | Err(_)));
        let mut unix = dial_unix(&endpoint);
        unix.set_read_timeout(Some(PATIENCE)).unwrap();
        // The right magic, then a body that makes no sense.
        unix.write_all(b"reknit\0\x03\x10\x00").unwrap();
        unix.write_all(&[0xff; 16]).unwrap();
        assert!(matches!(unix.read(&mut [0; 16]), Ok(0)));
    });
}

#[test]
fn silent_strangers_use_up_nothing() {
    let mut silent = Vec::new();
    join_works_in_spite_of(|zero, _| {
        for _ in 0..300 {
            let mut unix = dial_unix(&zero.endpoint());
            // One that was dropped for a later one already is fine too.
            let _ = unix.write_all(b"rek");
            silent.push((unix, TcpStream::connect(zero.endpoint().tcp).unwrap()));
        }
    });
}

#[test]
fn a_stranger_that_says_half_a_hello_is_hung_up_on() {
    let plane = plane();
    let mut unix = dial_unix(&plane.endpoint());
    unix.set_read_timeout(Some(PATIENCE)).unwrap();
    unix.write_all(b"rek").unwrap();
    assert!(matches!(unix.read(&mut [0; 16]), Ok(0)));
}

/// As when more connections come at once than a plane keeps.
#[test]
fn who_is_hung_up_on_before_an_answer_calls_again() {
    // Who passes the bytes on passes no descriptors on, so the two ranks must not share memory.
    let plain = || HostPlane::over(Transport::Unix, "node", "127.0.0.1").unwrap();
    let (zero, one) = (plain(), plain());
    let unix = format!("{}-between", zero.endpoint().unix);
    let between = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&unix).unwrap()).unwrap();
    let members = [Endpoint { unix, ..zero.endpoint() }, one.endpoint()];
    let barrier = |plane: &HostPlane, rank| {
        let mut group = plane.join(spec(&members, rank)).unwrap();
        group.submit(Op::Barrier, PATIENCE).wait().unwrap();
        group.retire();
    };
    thread::scope(|scope| {
        scope.spawn(|| barrier(&zero, 0));
        scope.spawn(|| barrier(&one, 1));
        drop(between.accept().unwrap());
        let (near, far) = (between.accept().unwrap().0, dial_unix(&zero.endpoint()));
        let back = (far.try_clone().unwrap(), near.try_clone().unwrap());
        let pass = |mut from: UnixStream, mut to: UnixStream| {
            let _cut_off = std::io::copy(&mut from, &mut to);
            let _closed_already = to.shutdown(Shutdown::Write);
        };
        scope.spawn(move || pass(near, far));
        pass(back.0, back.1);
    });
}

#[test]
fn a_dead_peer_fails_the_join_at_once() {
    let (zero, one) = (plane(), plane());
    let members = [zero.endpoint(), one.endpoint()];
    drop(zero);
    let error = one.join(spec(&members, 1)).unwrap_err();
    assert!(matches!(error, PlaneError::PeerLost { rank: 0, .. }), "{error}");
}

#[test]
fn dropping_a_plane_fails_its_groups_and_tells_the_peers() {
    let (zero, one) = (plane(), plane());
    let members = [zero.endpoint(), one.endpoint()];
    let (mut first, mut second) = thread::scope(|scope| {
        let first = scope.spawn(|| zero.join(spec(&members, 0)).unwrap());
        let second = one.join(spec(&members, 1)).unwrap();
        (first.join().unwrap(), second)
    });
    drop(zero);
    let error = first.submit(Op::Barrier, PATIENCE).wait().unwrap_err();
    assert!(matches!(error, PlaneError::Aborted { .. }), "{error}");
    let error = second.submit(Op::Barrier, PATIENCE).wait().unwrap_err();
    assert!(
        matches!(&error, PlaneError::PeerLeft { rank: 0, detail, .. } if detail.contains("going away")),
        "{error}"
    );
}

#[test]
fn an_address_that_nobody_can_reach_is_refused() {
    for address in ["0.0.0.0", "::", "localhost", ""] {
        let error = HostPlane::new("node", address).unwrap_err();
        assert!(error.to_string().contains("IP address"), "{error}");
    }
}
