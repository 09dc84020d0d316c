//! Puts store, loop and services together, and takes them apart again.

use crate::clock::Clock;
use crate::config::{Config, StoreKind};
use crate::failure::Failure;
use crate::rpc;
use crate::run::{Coordinator, INPUT_BACKLOG, WATCH_BACKLOG};
use crate::store::{Embedded, Etcd, Store, StoreError};
use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tokio::time::timeout;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::service::Routes;
use tonic::transport::Server;

/// Calls in progress end within this time after a stop.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(3);
/// A peer whose machine is gone is found within the sum of both.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(2);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(5);
/// Of one connection. An agent or a worker needs one, a dashboard a handful.
const STREAMS_PER_CONNECTION: u32 = 128;

/// Runs the daemon until `stop` resolves or it must not go on.
pub async fn serve(config: Config, stop: impl Future<Output = ()>) -> Result<(), Failure> {
    let address = config.listen;
    let listen = async {
        let listener = TcpListener::bind(address).await?;
        let bound = listener.local_addr()?;
        Ok((listener, bound))
    };
    let (listener, bound) = listen.await.map_err(|source| Failure::Listen { address, source })?;
    let mut stop = std::pin::pin!(stop);
    let store = tokio::select! {
        store = open_store(&config) => store.map_err(Failure::Open)?,
        () = &mut stop => return Ok(()),
    };

    let clock = Clock::start();
    let (inputs, to_loop) = mpsc::channel(INPUT_BACKLOG);
    let (watchers, _) = broadcast::channel(WATCH_BACKLOG);
    let routes = rpc::services(rpc::Loop {
        inputs: inputs.clone(),
        watchers: watchers.downgrade(),
        timeouts: config.timeouts,
        clock,
    })
    .await
    .map_err(|error| Failure::Internal(format!("reflection: {error}")))?;
    let coordinator = Coordinator::start(config.timeouts, clock, store.clone(), watchers, inputs).await?;

    let (drain, draining) = watch::channel(false);
    let (up, went_down) = oneshot::channel::<Infallible>();
    let server = tokio::spawn(async move {
        let _up = up;
        serve_until(routes, listener, draining).await
    });
    tracing::info!(address = %bound, "serving gRPC");
    if let Some(path) = &config.ready_file {
        write_whole(path, &bound.to_string())
            .map_err(|source| Failure::ReadyFile { path: path.clone(), source })?;
    }

    let stop_or_down = async {
        tokio::select! {
            () = stop => {}
            // Nothing is ever sent: this is the server's end.
            _ = went_down => {}
        }
    };
    let mut ended = coordinator.run(to_loop, stop_or_down).await;
    if ended.is_ok() && server.is_finished() {
        ended = Err(Failure::Internal("the gRPC server ended by itself".to_owned()));
    }
    // The loop has dropped every session and watch, which ends their streams, and nothing is stored any more.
    tracing::info!("stopping");
    let _ = drain.send(true);
    let (drained, ()) = tokio::join!(timeout(DRAIN_TIMEOUT, server), store.release());
    match drained {
        Ok(Ok(Ok(()))) => {}
        Ok(Ok(Err(error))) => tracing::warn!(%error, "the server ended with an error"),
        Ok(Err(panic)) => tracing::error!(%panic, "the server died"),
        Err(_) => tracing::warn!("some calls did not end in time and are cut off"),
    }
    ended
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

async fn open_store(config: &Config) -> Result<Arc<dyn Store>, StoreError> {
    Ok(match config.store {
        StoreKind::Embedded => Arc::new(Embedded::open(&config.state_dir).await?),
        StoreKind::Etcd => {
            let etcd = &config.etcd;
            Arc::new(Etcd::open(&etcd.endpoints, &etcd.prefix, etcd.lease_time()).await?)
        }
    })
}

/// A reader sees all of it or no file.
fn write_whole(path: &Path, text: &str) -> io::Result<()> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    std::fs::write(&beside, text)?;
    std::fs::rename(&beside, path)
}
