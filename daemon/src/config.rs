//! What the daemon is told at its start: defaults < file < environment < flags.

mod flags;

pub use flags::Flags;

use reknit_engine::Timeouts;
use reknit_layout::Topology;
use serde::{Deserialize, Serialize};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The whole configuration, as the file gives it and `--print-config` prints it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Port 0 takes any free one.
    pub listen: SocketAddr,
    /// Where clients reach this daemon, such as http://10.0.0.1:7400; the bound address when not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advertise: Option<String>,
    pub state_dir: PathBuf,
    /// A file that says which nodes share NVLink; without it each node is a domain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub topology: Option<PathBuf>,
    pub store: StoreKind,
    pub log: LogFormat,
    /// Gets the bound address once the daemon leads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready_file: Option<PathBuf>,
    pub etcd: EtcdConfig,
    /// Written by [`Timeouts::explained`].
    #[serde(skip_serializing)]
    pub timeouts: Timeouts,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum StoreKind {
    Embedded,
    Etcd,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    Human,
    Json,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EtcdConfig {
    pub endpoints: Vec<String>,
    /// Before every key.
    pub prefix: String,
    /// How long after this daemon's death another may lead.
    pub lease_seconds: u32,
    /// PEM files: who signs the members' certificates, and what this daemon shows them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cert: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub password_file: Option<PathBuf>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 7400)),
            advertise: None,
            state_dir: PathBuf::from("/var/lib/reknitd"),
            topology: None,
            store: StoreKind::Embedded,
            log: LogFormat::Human,
            ready_file: None,
            etcd: EtcdConfig::default(),
            timeouts: Timeouts::default(),
        }
    }
}

impl Default for EtcdConfig {
    fn default() -> Self {
        Self {
            endpoints: Vec::new(),
            prefix: "/reknit/".to_owned(),
            lease_seconds: 3,
            ca: None,
            cert: None,
            key: None,
            user: None,
            password_file: None,
        }
    }
}

impl EtcdConfig {
    pub fn lease_time(&self) -> Duration {
        Duration::from_secs(self.lease_seconds.into())
    }

    fn validate_credentials(&self) -> Result<(), ConfigError> {
        let refused = |key: &str, problem: &str| Err(ConfigError::new(format!("etcd.{key}"), problem));
        let plain = self.endpoints.iter().any(|endpoint| !endpoint.starts_with("https://"));
        if self.cert.is_some() != self.key.is_some() {
            return refused("cert", "a certificate needs its key: give both --etcd-cert and --etcd-key");
        }
        if self.cert.is_some() && self.ca.is_none() {
            return refused("ca", "is missing: give --etcd-ca, which signs the members' certificates");
        }
        if self.ca.is_some() && plain {
            return refused("endpoints", "with --etcd-ca every endpoint starts with https://");
        }
        if self.ca.is_none() && self.endpoints.iter().any(|endpoint| endpoint.starts_with("https://")) {
            return refused(
                "ca",
                "is missing: https:// endpoints need --etcd-ca, which signs their certificates",
            );
        }
        if self.user.is_some() != self.password_file.is_some() {
            return refused(
                "user",
                "a user needs a password: give both --etcd-user and --etcd-password-file",
            );
        }
        Ok(())
    }
}

/// A configuration that cannot work: where it came from, what is wrong, what to write instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {problem}")]
pub struct ConfigError {
    pub place: String,
    pub problem: String,
}

impl ConfigError {
    pub(crate) fn new(place: impl ToString, problem: impl ToString) -> Self {
        Self { place: place.to_string(), problem: problem.to_string() }
    }
}

impl Config {
    /// All layers together, validated.
    pub fn from_flags(flags: &Flags) -> Result<Self, ConfigError> {
        let mut config = match &flags.config {
            Some(path) => Self::from_file(path)?,
            None => Self::default(),
        };
        flags.override_into(&mut config);
        config.validate()?;
        Ok(config)
    }

    fn from_file(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|error| {
            ConfigError::new(path.display(), format!("cannot be read: {error}; check --config"))
        })?;
        toml::from_str(&text).map_err(|error: toml::de::Error| {
            let line = error.span().map(|span| 1 + text[..span.start].matches('\n').count());
            let place = match line {
                Some(line) => format!("{}, line {line}", path.display()),
                None => path.display().to_string(),
            };
            ConfigError::new(place, one_line(error.message()))
        })
    }

    /// # Errors
    /// With the line and what is allowed there.
    pub fn read_topology(&self) -> Result<Topology, ConfigError> {
        let Some(path) = &self.topology else { return Ok(Topology::default()) };
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|error| ConfigError::new(&name, format!("cannot be read: {error}; check --topology")))?;
        Topology::parse(&text, &name).map_err(|error| ConfigError::new("topology", error))
    }

    pub fn validate(&self) -> Result<(), ConfigError> {
        if !self.listen.ip().is_loopback() {
            return Err(ConfigError::new(
                "listen",
                format!(
                    "{} can be reached from other machines, which needs TLS, and this version has none; listen on 127.0.0.1 or [::1]",
                    self.listen
                ),
            ));
        }
        if self.store == StoreKind::Etcd && self.etcd.endpoints.is_empty() {
            return Err(ConfigError::new(
                "etcd.endpoints",
                "none is given; name at least one, such as --endpoints http://127.0.0.1:2379",
            ));
        }
        if self.store == StoreKind::Embedded && !self.etcd.endpoints.is_empty() {
            return Err(ConfigError::new(
                "etcd.endpoints",
                "are given, but the store is embedded: add --store etcd, or leave --endpoints out",
            ));
        }
        self.etcd.validate_credentials()?;
        if let Some(address) = &self.advertise {
            let single: Result<reknit_client::Daemons, _> = address.parse();
            if !single.is_ok_and(|address| address.count() == 1) {
                return Err(ConfigError::new(
                    "advertise",
                    format!("`{address}` is no address: write http://HOST:PORT"),
                ));
            }
        }
        let prefix = &self.etcd.prefix;
        if prefix.len() < 3 || !prefix.starts_with('/') || !prefix.ends_with('/') {
            return Err(ConfigError::new(
                "etcd.prefix",
                format!("`{prefix}` must start and end with a slash, such as /reknit/"),
            ));
        }
        if self.etcd.lease_seconds == 0 || self.etcd.lease_seconds > 3600 {
            return Err(ConfigError::new(
                "etcd.lease_seconds",
                format!("{} is not in 1 to 3600", self.etcd.lease_seconds),
            ));
        }
        let ladder = self.timeouts.validate();
        ladder.map_err(|problem| ConfigError::new("timeouts", problem))
    }

    /// As a configuration file, with every key that may stand there and the reason of every timeout.
    pub fn to_toml(&self) -> Result<String, ConfigError> {
        let text = toml::to_string(self).map_err(|error| ConfigError::new("--print-config", error))?;
        let (own, etcd) = text.split_once("\n[etcd]\n").unwrap_or((&text, ""));
        let (own_unset, etcd_unset) = (unset(own, &OPTIONAL), unset(etcd, &OPTIONAL_ETCD));
        Ok(format!("{own}{own_unset}\n[etcd]\n{etcd}{etcd_unset}\n{}", self.timeouts.explained()))
    }
}

/// What may be absent: key, example, what it is for.
type Optional = (&'static str, &'static str, &'static str);

const OPTIONAL: [Optional; 3] = [
    (
        "advertise",
        "http://10.0.0.1:7400",
        "where clients reach this daemon; the bound address when not given",
    ),
    (
        "topology",
        "/etc/reknit/topology.toml",
        "which nodes share NVLink; each is a domain of its own when not given",
    ),
    ("ready_file", "/run/reknitd.ready", "gets the bound address once the daemon leads"),
];

const OPTIONAL_ETCD: [Optional; 5] = [
    (
        "ca",
        "/etc/reknit/etcd-ca.pem",
        "PEM: signs the members' certificates; the endpoints are https:// then",
    ),
    (
        "cert",
        "/etc/reknit/etcd-client.pem",
        "PEM: what this daemon shows them, where they ask for it; with its key",
    ),
    ("key", "/etc/reknit/etcd-client.key", "PEM: the key of that certificate"),
    ("user", "reknit", "where etcd has users; with its password"),
    ("password_file", "/etc/reknit/etcd-password", "holds that user's password"),
];

/// The keys that `table` lacks, as comments.
fn unset(table: &str, keys: &[Optional]) -> String {
    let given = |key: &str| table.lines().any(|line| line.split(" = ").next() == Some(key));
    let missing = keys.iter().filter(|(key, _, _)| !given(key));
    missing.map(|(key, example, what)| format!("# {what}\n#{key} = \"{example}\"\n")).collect()
}

fn one_line(text: &str) -> String {
    let lines: Vec<_> = text.lines().map(str::trim).collect();
    lines.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn parse(arguments: &[&str]) -> Result<Config, ConfigError> {
        let arguments = ["reknitd"].iter().chain(arguments);
        Config::from_flags(&Flags::try_parse_from(arguments).unwrap())
    }

    #[test]
    fn flags_win_over_the_file_and_the_file_over_defaults() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("r.toml");
        let text = "listen = \"127.0.0.1:1\"\n[timeouts]\nrejoin_hold_ms = 7\n";
        std::fs::write(&file, text).unwrap();
        let config = parse(&["--config", file.to_str().unwrap(), "--listen", "[::1]:2"]).unwrap();
        assert_eq!(config.listen.to_string(), "[::1]:2");
        assert_eq!(config.timeouts.rejoin_hold_ms, 7);
        assert_eq!(config.timeouts.operation_ms, Timeouts::default().operation_ms);
        assert_eq!(config.store, StoreKind::Embedded);
    }

    #[test]
    fn what_is_printed_reads_back_the_same() {
        let config = parse(&["--etcd-prefix", "/a/", "--store", "embedded"]).unwrap();
        let text = config.to_toml().unwrap();
        assert_eq!(toml::from_str::<Config>(&text).unwrap(), config);
    }

    #[test]
    fn what_is_printed_has_every_key() {
        // Without what is given each key stands there as a comment; with it, once.
        let bare = parse(&[]).unwrap().to_toml().unwrap();
        let uncommented: Vec<_> = bare.lines().map(|line| line.strip_prefix('#').unwrap_or(line)).collect();
        let keys = uncommented.iter().filter(|line| !line.starts_with(' ')).copied();
        let full: Config = toml::from_str(&keys.collect::<Vec<_>>().join("\n")).unwrap();
        let Config { advertise, topology, ready_file, etcd, .. } = &full;
        let EtcdConfig { ca, cert, key, user, password_file, .. } = etcd;
        assert!([advertise, user].iter().all(|value| value.is_some()), "{bare}");
        let files = [topology, ready_file, ca, cert, key, password_file];
        assert!(files.iter().all(|value| value.is_some()), "{bare}");
        let printed = full.to_toml().unwrap();
        assert!(!printed.lines().any(|line| line.starts_with('#') && !line.starts_with("# ")), "{printed}");
        assert_eq!(toml::from_str::<Config>(&printed).unwrap(), full);
    }

    #[test]
    fn refusals_say_where_and_what() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("r.toml");
        std::fs::write(&file, "log = \"json\"\nlisten_on = 3\n").unwrap();
        let error = parse(&["--config", file.to_str().unwrap()]).unwrap_err();
        assert!(error.place.ends_with("r.toml, line 2"), "{error}");
        assert!(error.problem.contains("unknown field `listen_on`"), "{error}");
        assert!(!error.to_string().contains('\n'));

        let refused = |arguments: &[&str]| parse(arguments).unwrap_err().place;
        assert_eq!(refused(&["--listen", "0.0.0.0:7400"]), "listen");
        assert_eq!(refused(&["--store", "etcd"]), "etcd.endpoints");
        assert_eq!(refused(&["--etcd-prefix", "x"]), "etcd.prefix");
    }
}
