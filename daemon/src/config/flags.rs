//! The command line and the environment.

use super::{Config, ConfigError, LogFormat, StoreKind};
use clap::{CommandFactory, Parser};
use std::net::SocketAddr;
use std::path::PathBuf;

const ENVIRONMENT: &str = "REKNITD_";

/// The coordinator of Reknit: keeps training jobs running when GPUs fail.
#[derive(Debug, Clone, Parser)]
#[command(name = "reknitd", version)]
pub struct Flags {
    /// A TOML file; --print-config shows its shape.
    #[arg(long, env = "REKNITD_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Where agents, workers and operators connect. Port 0 takes any free one [default: 127.0.0.1:7400]
    #[arg(long, env = "REKNITD_LISTEN", value_name = "ADDRESS:PORT")]
    pub listen: Option<SocketAddr>,
    /// Where clients reach this daemon [default: the bound address]
    #[arg(long, env = "REKNITD_ADVERTISE", value_name = "URL")]
    pub advertise: Option<String>,
    /// A topology file: which nodes share NVLink. Without it each node is a domain of its own.
    #[arg(long, env = "REKNITD_TOPOLOGY", value_name = "FILE")]
    pub topology: Option<PathBuf>,
    /// Where the embedded store lies [default: /var/lib/reknitd]
    #[arg(long, env = "REKNITD_STATE_DIR", value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Where jobs and incidents are kept [default: embedded]
    #[arg(long, env = "REKNITD_STORE")]
    pub store: Option<StoreKind>,
    /// The members of the etcd cluster, separated by commas.
    #[arg(long, env = "REKNITD_ENDPOINTS", value_name = "URL", value_delimiter = ',')]
    pub endpoints: Vec<String>,
    /// Before every key in etcd [default: /reknit/]
    #[arg(long, env = "REKNITD_ETCD_PREFIX")]
    pub etcd_prefix: Option<String>,
    /// How long after this daemon's death another may lead [default: 3]
    #[arg(long, env = "REKNITD_ETCD_LEASE_SECONDS", value_name = "N")]
    pub etcd_lease_seconds: Option<u32>,
    /// PEM file with the certificate that signs the etcd members'. The endpoints are https:// then.
    #[arg(long, env = "REKNITD_ETCD_CA", value_name = "FILE")]
    pub etcd_ca: Option<PathBuf>,
    /// PEM file with this daemon's certificate for etcd.
    #[arg(long, env = "REKNITD_ETCD_CERT", value_name = "FILE")]
    pub etcd_cert: Option<PathBuf>,
    /// PEM file with the key of that certificate.
    #[arg(long, env = "REKNITD_ETCD_KEY", value_name = "FILE")]
    pub etcd_key: Option<PathBuf>,
    #[arg(long, env = "REKNITD_ETCD_USER", value_name = "NAME")]
    pub etcd_user: Option<String>,
    /// File with that user's password.
    #[arg(long, env = "REKNITD_ETCD_PASSWORD_FILE", value_name = "FILE")]
    pub etcd_password_file: Option<PathBuf>,
    /// A collective that takes longer is stuck. Must exceed the longest step.
    #[arg(long, env = "REKNITD_OPERATION_MS", value_name = "N")]
    pub operation_ms: Option<u32>,
    /// How long a GPU that may rejoin waits before its worker is started again.
    #[arg(long, env = "REKNITD_REJOIN_HOLD_MS", value_name = "N")]
    pub rejoin_hold_ms: Option<u32>,
    /// How long a started worker may take to open its session.
    #[arg(long, env = "REKNITD_START_MS", value_name = "N")]
    pub start_ms: Option<u32>,
    /// How long a new daemon waits for reports before it declares anything lost.
    #[arg(long, env = "REKNITD_REBUILD_MS", value_name = "N")]
    pub rebuild_ms: Option<u32>,
    /// [default: human]
    #[arg(long, env = "REKNITD_LOG")]
    pub log: Option<LogFormat>,
    /// Gets the bound address once the daemon leads; in stand-by it is not written.
    #[arg(long, env = "REKNITD_READY_FILE", value_name = "FILE")]
    pub ready_file: Option<PathBuf>,
    /// Print the configuration that results, as a file, and exit.
    #[arg(long)]
    pub print_config: bool,
}

impl Flags {
    /// From this process's arguments and environment. `--help` and `--version` print and exit.
    pub fn parse_or_refuse() -> Result<Self, ConfigError> {
        refuse_unknown_environment(std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()))?;
        Self::try_parse().map_err(|error| {
            if !error.use_stderr() {
                error.exit();
            }
            let text = error.to_string();
            let first = text.lines().next().unwrap_or_default();
            let first = first.strip_prefix("error: ").unwrap_or(first);
            ConfigError::new("command line", format!("{first}; see reknitd --help"))
        })
    }

    pub(super) fn override_into(&self, config: &mut Config) {
        fn set_some<T: Clone>(value: &mut Option<T>, given: &Option<T>) {
            if given.is_some() {
                value.clone_from(given);
            }
        }
        fn set<T: Clone>(value: &mut T, given: &Option<T>) {
            if let Some(given) = given {
                *value = given.clone();
            }
        }
        set(&mut config.listen, &self.listen);
        set(&mut config.state_dir, &self.state_dir);
        set(&mut config.store, &self.store);
        set(&mut config.log, &self.log);
        set(&mut config.etcd.prefix, &self.etcd_prefix);
        set(&mut config.etcd.lease_seconds, &self.etcd_lease_seconds);
        set(&mut config.timeouts.operation_ms, &self.operation_ms);
        set(&mut config.timeouts.rejoin_hold_ms, &self.rejoin_hold_ms);
        set(&mut config.timeouts.start_ms, &self.start_ms);
        set(&mut config.timeouts.rebuild_ms, &self.rebuild_ms);
        set_some(&mut config.ready_file, &self.ready_file);
        set_some(&mut config.advertise, &self.advertise);
        set_some(&mut config.topology, &self.topology);
        set_some(&mut config.etcd.ca, &self.etcd_ca);
        set_some(&mut config.etcd.cert, &self.etcd_cert);
        set_some(&mut config.etcd.key, &self.etcd_key);
        set_some(&mut config.etcd.user, &self.etcd_user);
        set_some(&mut config.etcd.password_file, &self.etcd_password_file);
        if !self.endpoints.is_empty() {
            config.etcd.endpoints.clone_from(&self.endpoints);
        }
    }
}

/// A misspelt variable would be ignored in silence otherwise.
fn refuse_unknown_environment(names: impl Iterator<Item = String>) -> Result<(), ConfigError> {
    let command = Flags::command();
    let known = |name: &str| command.get_arguments().filter_map(clap::Arg::get_env).any(|env| env == name);
    for name in names {
        if name.starts_with(ENVIRONMENT) && !known(&name) {
            return Err(ConfigError::new(name, "is not a variable of reknitd; see reknitd --help"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_variables_are_refused() {
        let check = |name: &str| refuse_unknown_environment([name.to_owned()].into_iter());
        assert_eq!(check("REKNITD_LISTEN"), Ok(()));
        assert_eq!(check("PATH"), Ok(()));
        let error = check("REKNITD_LISTN").unwrap_err();
        assert_eq!(error.place, "REKNITD_LISTN");
    }
}
