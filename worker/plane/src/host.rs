//! The host plane: shared memory and Unix sockets on one node, TCP between nodes.
//!
//! One thread accepts connections ([`lobby`]), one moves the data of all groups ([`engine`]), except of those whose owner
//! waits and does it itself meanwhile ([`room`]). An operation is lowered to rounds of transfers ([`program`]) on the
//! submitter's thread; what is left is to run them.

mod engine;
mod frame;
mod handle;
mod handshake;
mod hub;
mod join;
mod life;
mod link;
mod lobby;
mod meeting;
mod memory;
mod offer;
mod program;
mod ring;
mod room;
mod running;
mod streaming;
mod transfer;
mod watch;
mod window;
mod wire;
mod work;

use crate::{Endpoint, Group, GroupSpec, Plane, PlaneError};
use engine::Engine;
use handle::HostGroup;
use handshake::Key;
use hub::{Hub, bell};
use join::Join;
use life::Life;
use lobby::Lobby;
use offer::Windows;
use room::Room;
use std::net::{IpAddr, TcpListener};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use work::Shared;

/// Longer join deadlines are cut to this.
const LONGEST_JOIN: Duration = Duration::from_secs(24 * 3600);
/// More ranks than the frames can name.
const MAX_SIZE: usize = 1 << 16;

/// What a plane uses towards the ranks of its own node. Those of other nodes are always reached over TCP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Transport {
    /// Shared memory, with a Unix socket beside it; the socket alone where memory cannot be shared.
    #[default]
    Shared,
    /// Unix sockets.
    Unix,
    /// TCP. All ranks of a node must choose this one alike.
    Tcp,
}

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

/// Data over shared memory and sockets. Dropping it ends its threads and fails its groups.
#[derive(Debug)]
pub struct HostPlane {
    endpoint: Endpoint,
    transport: Transport,
    windows: Windows,
    lobby: Arc<Lobby>,
    hub: Arc<Hub>,
    threads: Vec<JoinHandle<()>>,
}

impl HostPlane {
    /// Listens on a Unix socket with a random abstract name and on a free TCP port of `tcp_bind_ip`, which is also
    /// where peers on other nodes are told to connect. Peers with an equal `node` use the Unix socket.
    pub fn new(node: &str, tcp_bind_ip: &str) -> Result<HostPlane, HostError> {
        HostPlane::over(Transport::default(), node, tcp_bind_ip)
    }

    /// The same with another transport between the ranks of one node.
    pub fn over(transport: Transport, node: &str, tcp_bind_ip: &str) -> Result<HostPlane, HostError> {
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
        let hub = Arc::new(Hub::new()?);
        // A kernel without it only shows deaths later.
        let life = (transport == Transport::Shared).then(|| Life::new().ok().map(Arc::new)).flatten();
        let engine = Engine::new(&hub, life.as_ref());
        let watch = Arc::clone(&hub);
        let lobby = Arc::new(Lobby::new()?);
        let mut plane = HostPlane {
            endpoint,
            transport,
            windows: Windows::new(transport == Transport::Shared, life),
            lobby: Arc::clone(&lobby),
            hub,
            threads: Vec::new(),
        };
        let (alive, tied) = std::sync::mpsc::channel();
        plane.spawn("plane-engine", move || engine.run(&alive))?;
        // No peer may see the signs of life before there are any.
        let _engine_is_up = tied.recv();
        plane.spawn("plane-watch", move || watch.watch.run())?;
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
        let desk = bell().map_err(io)?;
        let desk = self.lobby.open(&key, desk).map_err(|why| join::no_desk(&spec, why))?;
        let tcp_only = self.transport == Transport::Tcp;
        let links = Join::new(&spec, &key, until, &self.windows, tcp_only).run(&desk)?;
        let shared = Shared::new(self.hub.next_id(), &spec.name, spec.rank, size, spec.epoch);
        let room = Arc::new(Room::new(&self.hub, &Arc::new(shared), links).map_err(io)?);
        if self.hub.open(&room).is_err() {
            return Err(join::no_desk(&spec, lobby::NoDesk::Stopping));
        }
        Ok(Box::new(HostGroup::new(room)))
    }

    fn abort_joins(&self, epoch: u64) {
        self.lobby.close_to(epoch);
    }
}

impl Drop for HostPlane {
    fn drop(&mut self) {
        self.lobby.stop();
        self.hub.stop();
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
mod tests;
