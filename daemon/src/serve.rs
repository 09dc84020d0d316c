//! Puts store, loop and services together, and takes them apart again.

use crate::clock::Clock;
use crate::config::{Config, StoreKind};
use crate::failure::Failure;
use crate::input::Inputs;
use crate::rpc;
use crate::rpc::{Gate, Standing};
use crate::run::{Coordinator, WATCH_BACKLOG};
use crate::store::{CANNOT_LEAD, Connection, Embedded, Etcd, Store, StoreError, Stored};
use reknit_engine::State;
use reknit_layout::Topology;
use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{broadcast, oneshot, watch};
use tokio::time::{sleep, timeout};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic_health::server::HealthReporter;

/// Calls in progress end within this time after a stop.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(3);
/// A peer whose machine is gone is found within the sum of both.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(2);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(5);
/// Between two attempts to lead while the store cannot be reached.
const CAMPAIGN_PAUSE: Duration = Duration::from_millis(200);
/// To which it doubles while the store refuses this daemon: until somebody does what the log says.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Of one connection. An agent or a worker needs one, a dashboard a handful.
const STREAMS_PER_CONNECTION: u32 = 128;

/// Runs the daemon until `stop` resolves or it must not go on: in stand-by until it leads, and again when it leads no
/// more.
pub async fn serve(config: Config, stop: impl Future<Output = ()>) -> Result<(), Failure> {
    let address = config.listen;
    let listen = async {
        let listener = TcpListener::bind(address).await?;
        let bound = listener.local_addr()?;
        Ok((listener, bound))
    };
    let (listener, bound) = listen.await.map_err(|source| Failure::Listen { address, source })?;
    let topology = config.read_topology()?;
    let place = StorePlace::new(&config).await?;
    let address = config.advertise.clone().unwrap_or_else(|| format!("http://{bound}"));
    let (standing, now) = watch::channel(Standing::StandBy);
    let gate = Gate { standing: now, address: address.clone(), stored: place.stored() };
    let (routes, health) =
        rpc::services(gate).map_err(|error| Failure::Internal(format!("reflection: {error}")))?;
    rpc::report_health(&health, false).await;

    let (drain, draining) = watch::channel(false);
    let (up, went_down) = oneshot::channel::<Infallible>();
    let server = tokio::spawn(async move {
        let _up = up;
        serve_until(routes, listener, draining).await
    });
    let mut stop = std::pin::pin!(async {
        tokio::select! {
            () = stop => Ok(()),
            // Nothing is ever sent: this is the server's end.
            _ = went_down => Err(Failure::Internal("the gRPC server ended by itself".to_owned())),
        }
    });
    tracing::info!(address = %bound, "listening");
    let clock = Clock::start();
    let mut reached = false;
    let mut pause = Duration::ZERO;
    let ended = loop {
        let store = tokio::select! {
            store = async { sleep(pause).await; place.lead(&address).await } => store,
            ended = &mut stop => break ended,
        };
        let store = match store {
            Ok(store) => store,
            Err(error) => {
                // A lease that was lost had been granted: the store was there, and will be again.
                reached |= matches!(error, StoreError::LeadershipLost { .. });
                if !(reached && error.passes()) {
                    break Err(Failure::Open(error));
                }
                place.complain(&error);
                let refused = matches!(error, StoreError::Refused { .. });
                pause = if refused { longer(pause) } else { CAMPAIGN_PAUSE };
                continue;
            }
        };
        reached = true;
        let ended = lead(&config, &topology, clock, store, &standing, &health, bound, &mut stop).await;
        standing.send_replace(Standing::StandBy);
        rpc::report_health(&health, false).await;
        match ended {
            Err(failure) if failure.ends_leadership() => {
                tracing::warn!(%failure, "in stand-by; workers go on training");
                pause = if failure.is_refusal() { longer(pause) } else { Duration::ZERO };
            }
            Ok(()) | Err(_) => break ended,
        }
    };
    // The loop has dropped every session and watch, which ends their streams, and nothing is stored any more.
    tracing::info!("stopping");
    let _ = drain.send(true);
    match timeout(DRAIN_TIMEOUT, server).await {
        Ok(Ok(Ok(()))) => {}
        Ok(Ok(Err(error))) => tracing::warn!(%error, "the server ended with an error"),
        Ok(Err(panic)) => tracing::error!(%panic, "the server died"),
        Err(_) => tracing::warn!("some calls did not end in time and are cut off"),
    }
    ended
}

fn longer(pause: Duration) -> Duration {
    (pause * 2).clamp(CAMPAIGN_PAUSE, LONGEST_PAUSE)
}

/// From the store's contents to the end of the leadership.
#[allow(clippy::too_many_arguments)] // The parts of one daemon.
async fn lead(
    config: &Config,
    topology: &Topology,
    clock: Clock,
    store: Arc<dyn Store>,
    standing: &watch::Sender<Standing>,
    health: &HealthReporter,
    bound: SocketAddr,
    stop: impl Future<Output = Result<(), Failure>>,
) -> Result<(), Failure> {
    let (inputs, to_loop) = Inputs::new(clock);
    let (watchers, _) = broadcast::channel(WATCH_BACKLOG);
    let timeouts = config.timeouts;
    let (to_inputs, to_watchers) = (inputs.clone(), watchers.downgrade());
    let state = State::new(timeouts).with_topology(topology.clone());
    let started = Coordinator::start(state, timeouts, clock, store.clone(), watchers, inputs).await;
    let coordinator = match started {
        Ok(coordinator) => coordinator,
        Err(failure) => {
            store.release().await;
            return Err(failure);
        }
    };
    let term = store.term();
    let handle = rpc::Loop { inputs: to_inputs, watchers: to_watchers, timeouts, clock, term };
    standing.send_replace(Standing::Leading(handle));
    rpc::report_health(health, true).await;
    tracing::info!(address = %bound, term, "serving gRPC");
    if let Some(path) = &config.ready_file {
        write_whole(path, &bound.to_string())
            .map_err(|source| Failure::ReadyFile { path: path.clone(), source })?;
    }
    let mut stopped = Ok(());
    let stop = async {
        stopped = stop.await;
    };
    let ended = coordinator.run(to_loop, stop).await;
    // Nothing is accepted any more before the lease is given back.
    standing.send_replace(Standing::StandBy);
    store.release().await;
    ended.and(stopped)
}

async fn serve_until(
    routes: Routes,
    listener: TcpListener,
    mut draining: watch::Receiver<bool>,
) -> Result<(), tonic::transport::Error> {
    // Orders are small and urgent.
    let connections = TcpListenerStream::new(listener).map(|connection| {
        connection.and_then(|connection| connection.set_nodelay(true).map(|()| connection))
    });
    let drained = async move {
        // An error says that the other end is gone, which is a stop as well.
        let _ = draining.wait_for(|drain| *drain).await;
    };
    Server::builder()
        .http2_keepalive_interval(Some(KEEP_ALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEP_ALIVE_TIMEOUT))
        .max_concurrent_streams(STREAMS_PER_CONNECTION)
        .add_routes(routes)
        .serve_with_incoming_shutdown(connections, drained)
        .await
}

/// Where the store is, before it is opened for writing.
enum StorePlace {
    Embedded(PathBuf),
    Etcd(Arc<Stored>),
}

impl StorePlace {
    async fn new(config: &Config) -> Result<Self, Failure> {
        Ok(match config.store {
            StoreKind::Embedded => Self::Embedded(config.state_dir.clone()),
            StoreKind::Etcd => {
                let connection = Connection::new(&config.etcd)?;
                let stored = Stored::new(connection).await.map_err(Failure::Open)?;
                Self::Etcd(Arc::new(stored))
            }
        })
    }

    fn stored(&self) -> Option<Arc<Stored>> {
        match self {
            Self::Embedded(_) => None,
            Self::Etcd(stored) => Some(stored.clone()),
        }
    }

    /// This daemon cannot lead now, and tries again.
    fn complain(&self, error: &StoreError) {
        match self {
            Self::Embedded(_) => tracing::warn!(%error, "{CANNOT_LEAD}"),
            Self::Etcd(stored) => stored.connection.complain(CANNOT_LEAD, error),
        }
    }

    /// Returns when this daemon leads.
    async fn lead(&self, address: &str) -> Result<Arc<dyn Store>, StoreError> {
        Ok(match self {
            Self::Embedded(dir) => Arc::new(Embedded::open(dir).await?),
            Self::Etcd(stored) => {
                // Before anything is written: nobody campaigns to lead over what cannot be read.
                stored.snapshot().await?;
                Arc::new(Etcd::open(&stored.connection, address).await?)
            }
        })
    }
}

/// A reader sees all of it or no file.
fn write_whole(path: &Path, text: &str) -> io::Result<()> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    std::fs::write(&beside, text)?;
    std::fs::rename(&beside, path)
}
