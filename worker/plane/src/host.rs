//! The host plane: Unix sockets on one node, TCP between nodes.
//!
//! One thread accepts connections ([`lobby`]), one moves the data of all groups ([`engine`]). An operation is lowered to
//! rounds of transfers ([`program`]) on the submitter's thread; the engine only runs them.

mod engine;
mod frame;
mod handle;
mod handshake;
mod join;
mod link;
mod lobby;
mod member;
mod memory;
mod program;
mod running;
mod transfer;
mod work;

use crate::{Endpoint, Group, GroupSpec, Plane, PlaneError};
use engine::{Command, Engine, MAX_SIZE, Mailbox};
use handle::HostGroup;
use handshake::Key;
use join::Join;
use lobby::Lobby;
use member::Member;
use std::net::{IpAddr, TcpListener};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use work::Shared;

/// Longer join deadlines are cut to this.
const LONGEST_JOIN: Duration = Duration::from_secs(24 * 3600);

/// Why a host plane could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    #[error(
        "data plane: {0:?} is not an IP address that peers on other nodes can reach; give one of this node's own"
    )]
    Address(String),
    #[error("data plane: cannot {what}: {source}")]
    System {
        what: String,
        #[source]
        source: std::io::Error,
    },
}

impl HostError {
    fn system(what: impl Into<String>, error: impl Into<std::io::Error>) -> HostError {
        HostError::System { what: what.into(), source: error.into() }
    }
}

/// Data over sockets. Dropping it ends its threads and fails its groups.
#[derive(Debug)]
pub struct HostPlane {
    endpoint: Endpoint,
    lobby: Arc<Lobby>,
    mailbox: Arc<Mailbox>,
    threads: Vec<JoinHandle<()>>,
}

impl HostPlane {
    /// Listens on a Unix socket with a random abstract name and on a free TCP port of `tcp_bind_ip`, which is also
    /// where peers on other nodes are told to connect. Peers with an equal `node` use the Unix socket.
    pub fn new(node: &str, tcp_bind_ip: &str) -> Result<HostPlane, HostError> {
        let ip: IpAddr = tcp_bind_ip
            .parse()
            .ok()
            .filter(|ip: &IpAddr| !ip.is_unspecified())
            .ok_or_else(|| HostError::Address(tcp_bind_ip.to_owned()))?;
        let (unix, unix_name) = listen_unix()?;
        let tcp_failed = |error| HostError::system(format!("listen on TCP at {ip}"), error);
        let tcp = TcpListener::bind((ip, 0)).map_err(tcp_failed)?;
        tcp.set_nonblocking(true).map_err(tcp_failed)?;
        let endpoint = Endpoint {
            node: node.to_owned(),
            unix: unix_name,
            tcp: tcp.local_addr().map_err(tcp_failed)?.to_string(),
        };
        let mailbox = Arc::new(Mailbox::new()?);
        let engine = Engine::new(&mailbox)?;
        let lobby = Arc::new(Lobby::new()?);
        let mut plane = HostPlane { endpoint, lobby: Arc::clone(&lobby), mailbox, threads: Vec::new() };
        plane.spawn("plane-engine", move || engine.run())?;
        plane.spawn("plane-lobby", move || lobby.run(&unix, &tcp))?;
        Ok(plane)
    }

    fn spawn(&mut self, name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), HostError> {
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(run)
            .map_err(|error| HostError::system(format!("start the thread {name}"), error))?;
        self.threads.push(thread);
        Ok(())
    }
}

impl Plane for HostPlane {
    fn endpoint(&self) -> Endpoint {
        self.endpoint.clone()
    }

    fn join(&self, spec: GroupSpec) -> Result<Box<dyn Group>, PlaneError> {
        let key = Key { job: spec.job.clone(), epoch: spec.epoch, group: spec.name.clone() };
        let refused = |detail: String| PlaneError::Handshake { group: spec.name.clone(), detail };
        let size = spec.members.len();
        if spec.rank >= size || size > MAX_SIZE {
            return Err(refused(format!("rank {} of {size} is not possible", spec.rank)));
        }
        if !key.fits() {
            return Err(refused("the job's or the group's name is too long".into()));
        }
        let until = Instant::now() + spec.deadline.min(LONGEST_JOIN);
        let io = |error: HostError| PlaneError::Io { group: spec.name.clone(), detail: error.to_string() };
        let bell = engine::bell().map_err(io)?;
        let desk = self.lobby.open(&key, bell).map_err(|why| join::no_desk(&spec, why))?;
        let links = Join::new(&spec, &key, until).run(&desk)?;
        let shared = Shared::new(&self.mailbox, &spec.name, spec.rank, size, spec.epoch);
        let shared = Arc::new(shared);
        let member = Member::new(Arc::clone(&shared), links);
        if self.mailbox.post(Command::Adopt(Box::new(member))).is_err() {
            return Err(join::no_desk(&spec, lobby::NoDesk::Stopping));
        }
        Ok(Box::new(HostGroup::new(shared)))
    }

    fn abort_joins(&self, epoch: u64) {
        self.lobby.close_to(epoch);
    }
}

impl Drop for HostPlane {
    fn drop(&mut self) {
        self.lobby.stop();
        let _ = self.mailbox.post(Command::Stop);
        for thread in self.threads.drain(..) {
            // A thread that panicked has nothing left to end.
            let _ = thread.join();
        }
    }
}

fn listen_unix() -> Result<(UnixListener, String), HostError> {
    let mut random = [0; 16];
    getrandom::fill(&mut random)
        .map_err(|error| HostError::system("get random numbers", std::io::Error::other(error.to_string())))?;
    let hex: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    let name = format!("reknit-{hex}");
    let failed = |error| HostError::system("listen on a Unix socket", error);
    let address = SocketAddr::from_abstract_name(&name).map_err(failed)?;
    let listener = UnixListener::bind_addr(&address).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok((listener, name))
}

#[cfg(test)]
mod tests {
    use super::handshake::{ANSWER, Hello, NONCE, PROOF};
    use super::*;
    use crate::{Op, Ticket};
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::thread;

    const PATIENCE: Duration = Duration::from_secs(30);

    /// Strangers that know the protocol and all names, but not the ticket, cannot take a rank or keep its owner out.
    #[test]
    fn a_false_proof_is_hung_up_on_and_a_missing_one_keeps_nobody_out() {
        let planes = [(); 2].map(|()| HostPlane::new("node", "127.0.0.1").unwrap());
        let members: Vec<Endpoint> = planes.iter().map(Plane::endpoint).collect();
        let join = |rank: usize| {
            let spec = GroupSpec {
                job: "job".into(),
                epoch: 1,
                name: "world".into(),
                members: members.clone(),
                rank,
                ticket: Ticket([1; 32]),
                deadline: PATIENCE,
            };
            let mut group = planes[rank].join(spec).unwrap();
            group.submit(Op::Barrier, PATIENCE).wait().unwrap();
            group.retire();
        };
        let hello = Hello {
            key: Key { job: "job".into(), epoch: 1, group: "world".into() },
            from: 1,
            to: 0,
            nonce: [0; NONCE],
        };
        let claim = || {
            let address = SocketAddr::from_abstract_name(&members[0].unix).unwrap();
            let mut stranger = UnixStream::connect_addr(&address).unwrap();
            stranger.set_read_timeout(Some(PATIENCE)).unwrap();
            stranger.write_all(&hello.encode()).unwrap();
            stranger
        };
        thread::scope(|scope| {
            scope.spawn(|| join(0));
            let mut liar = claim();
            liar.read_exact(&mut [0; ANSWER]).unwrap();
            liar.write_all(&[0; PROOF]).unwrap();
            assert_eq!(liar.read(&mut [0; 1]).unwrap(), 0);
            let silent: Vec<UnixStream> = (0..100).map(|_| claim()).collect();
            join(1);
            drop(silent);
        });
    }
}
