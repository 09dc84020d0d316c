//! How etcd is reached.

use crate::config::{ConfigError, EtcdConfig};
use crate::store::StoreError;
use etcd_client::{Certificate, Client, ConnectOptions, Identity, TlsOptions};
use reknit_client::root_cause;
use std::fmt;
use std::path::Path;
use std::time::Duration;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// The members of the cluster and what opens them. It has no connection of its own: each is made where it is used.
#[derive(Clone)]
pub struct Connection {
    pub(super) place: String,
    pub(super) prefix: String,
    pub(super) lease_time: Duration,
    endpoints: Vec<String>,
    options: ConnectOptions,
}

/// Without what is secret.
impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("place", &self.place).finish_non_exhaustive()
    }
}

impl Connection {
    /// Reads the files with certificates and the password.
    pub fn new(config: &EtcdConfig) -> Result<Self, ConfigError> {
        let mut options = ConnectOptions::new()
            .with_connect_timeout(CONNECT_TIMEOUT)
            .with_keep_alive(Duration::from_secs(1), Duration::from_secs(2))
            .with_keep_alive_while_idle(true)
            .with_require_leader(true);
        if let Some(ca) = &config.ca {
            let mut tls = TlsOptions::new().ca_certificate(Certificate::from_pem(read("etcd.ca", ca)?));
            if let (Some(cert), Some(key)) = (&config.cert, &config.key) {
                let identity = Identity::from_pem(read("etcd.cert", cert)?, read("etcd.key", key)?);
                tls = tls.identity(identity);
            }
            options = options.with_tls(tls);
        }
        if let (Some(user), Some(file)) = (&config.user, &config.password_file) {
            let password = read("etcd.password_file", file)?;
            let password = String::from_utf8(password).map_err(|_| {
                ConfigError::new("etcd.password_file", format!("{} is not text", file.display()))
            })?;
            options = options.with_user(user, password.trim_end_matches(['\r', '\n']));
        }
        Ok(Self {
            place: format!("etcd at {}", config.endpoints.join(",")),
            prefix: config.prefix.clone(),
            lease_time: config.lease_time(),
            endpoints: config.endpoints.clone(),
            options,
        })
    }

    /// A call takes at most a third of the lease: there is time for another try, at another member.
    pub(super) async fn prompt(&self) -> Result<Client, StoreError> {
        self.connect(self.options.clone().with_timeout(self.lease_time / 3)).await
    }

    /// For calls that last.
    pub(super) async fn patient(&self) -> Result<Client, StoreError> {
        self.connect(self.options.clone()).await
    }

    async fn connect(&self, options: ConnectOptions) -> Result<Client, StoreError> {
        Client::connect(&self.endpoints, Some(options)).await.map_err(|error| self.unreachable(&error))
    }

    pub(super) fn unreachable(&self, error: &etcd_client::Error) -> StoreError {
        StoreError::Unreachable { place: self.place.clone(), problem: root(error) }
    }
}

/// The innermost error says what happened, such as what is wrong with a certificate.
fn root(error: &etcd_client::Error) -> String {
    let (outer, inner) = (error.to_string(), root_cause(error));
    if outer.contains(&inner) { outer } else { format!("{outer}: {inner}") }
}

fn read(key: &str, path: &Path) -> Result<Vec<u8>, ConfigError> {
    std::fs::read(path)
        .map_err(|error| ConfigError::new(key, format!("{} cannot be read: {error}", path.display())))
}
