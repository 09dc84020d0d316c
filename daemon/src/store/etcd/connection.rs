//! How etcd is reached.

use super::RETRY_WAIT;
use super::complaints::Complaints;
use super::problem::Place;
use crate::config::{ConfigError, EtcdConfig};
use crate::store::StoreError;
use etcd_client::{Certificate, Client, ConnectOptions, Identity, TlsOptions};
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
const ASK_LIMIT: Duration = Duration::from_secs(10);
/// What fails when a daemon cannot even see who leads.
pub const CANNOT_LEAD: &str = "cannot lead";

/// The members of the cluster and what opens them. It has no connection of its own: each is made where it is used.
#[derive(Clone)]
pub struct Connection {
    pub(super) place: Place,
    pub(super) prefix: String,
    pub(super) lease_time: Duration,
    endpoints: Vec<String>,
    options: ConnectOptions,
    /// One for all copies.
    complaints: Arc<Complaints>,
}

/// Without what is secret.
impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("place", &self.place.name).finish_non_exhaustive()
    }
}

impl Connection {
    /// Reads the files with certificates and the password.
    pub fn new(config: &EtcdConfig) -> Result<Self, ConfigError> {
        let mut options = ConnectOptions::new()
            .with_connect_timeout(CONNECT_TIMEOUT)
            // A member whose machine is gone is found within the lease. One that is well closes connections over which it is
            // asked for a sign of life more often than every 5 s (--grpc-keepalive-min-time) while it has nothing to
            // say: the lease's answers come more often than this, and where nothing is asked nothing is sent.
            .with_keep_alive(config.lease_time() / 2, config.lease_time() / 2)
            .with_keep_alive_while_idle(false)
            .with_require_leader(true)
            // Tokens end by themselves, and with the member that knows them.
            .with_auto_token_refresh(true);
        if let Some(ca) = &config.ca {
            let mut tls = TlsOptions::new().ca_certificate(Certificate::from_pem(read("etcd.ca", ca)?));
            if let (Some(cert), Some(key)) = (&config.cert, &config.key) {
                let identity = Identity::from_pem(read("etcd.cert", cert)?, read("etcd.key", key)?);
                tls = tls.identity(identity);
            }
            options = options.with_tls(tls);
        }
        if let (Some(user), Some(file)) = (&config.user, &config.password_file) {
            let refused = |problem: &str| {
                ConfigError::new("etcd.password_file", format!("{} {problem}", file.display()))
            };
            let password = String::from_utf8(read("etcd.password_file", file)?);
            let password = password.map_err(|_| refused("is not text"))?;
            let password = password.trim_end_matches(['\r', '\n']);
            if password.is_empty() {
                return Err(refused("is empty; write the password to it"));
            }
            options = options.with_user(user, password);
        }
        Ok(Self {
            place: Place {
                name: format!("etcd at {}", config.endpoints.join(",")),
                secure: config.ca.is_some(),
            },
            prefix: config.prefix.clone(),
            lease_time: config.lease_time(),
            endpoints: config.endpoints.clone(),
            options,
            complaints: Arc::default(),
        })
    }

    /// A call takes at most a third of the lease, and of what is waited at all: there is time for another try, at another
    /// member.
    pub(super) async fn prompt(&self) -> Result<Client, StoreError> {
        self.connect(self.options.clone().with_timeout(self.lease_time.min(ASK_LIMIT) / 3)).await
    }

    /// For calls that last.
    pub(super) async fn patient(&self) -> Result<Client, StoreError> {
        self.connect(self.options.clone()).await
    }

    async fn connect(&self, options: ConnectOptions) -> Result<Client, StoreError> {
        // With a user this asks for a token.
        self.ask(|| Client::connect(&self.endpoints, Some(options.clone()))).await
    }

    /// Asks again for a while: of several members one may be gone, and be the one that is asked.
    pub(super) async fn ask<T, F>(&self, mut call: impl FnMut() -> F) -> Result<T, StoreError>
    where
        F: Future<Output = Result<T, etcd_client::Error>>,
    {
        let deadline = Instant::now() + self.lease_time.min(ASK_LIMIT);
        loop {
            match call().await.map_err(|error| self.place.problem(&error)) {
                Err(StoreError::Unreachable { .. }) if Instant::now() + RETRY_WAIT < deadline => {
                    sleep(RETRY_WAIT).await;
                }
                answer => return answer,
            }
        }
    }

    /// A line in the log, unless the same was said just now. `what` failed, and the daemon tries again.
    pub fn complain(&self, what: &'static str, error: &StoreError) {
        if !self.complaints.is_due(what, error, Instant::now()) {
            return;
        }
        match error {
            StoreError::Unreachable { problem, remedy, .. } => {
                let members = self.endpoints.join(",");
                tracing::warn!(
                    problem,
                    remedy,
                    "{what}: etcd has no quorum or cannot be reached ({members}); training goes on"
                );
            }
            other => tracing::warn!(error = %other, "{what}; trying again, and training goes on"),
        }
    }

    pub(super) fn corrupt(&self, key: &str, problem: String) -> StoreError {
        StoreError::Corrupt { place: self.at(key), problem, remedy: super::REMEDY }
    }

    /// `key`: without the prefix.
    pub(super) fn at(&self, key: &str) -> String {
        format!("{}{key} in {}", self.prefix, self.place.name)
    }
}

fn read(key: &str, path: &Path) -> Result<Vec<u8>, ConfigError> {
    std::fs::read(path)
        .map_err(|error| ConfigError::new(key, format!("{} cannot be read: {error}", path.display())))
}
