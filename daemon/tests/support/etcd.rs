//! A real etcd of one member, plain or with TLS and users.

use super::{Daemon, PATIENCE};
use etcd_client::{
    Certificate as Pem, Client, ConnectOptions, Error, GetOptions, Identity, Permission, PermissionType,
    TlsOptions,
};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// In seconds.
pub const LEASE: &str = "2";
/// Every key's beginning unless a daemon is told otherwise.
pub const PREFIX: &str = "/reknit/";

/// On free ports of this machine, ended when dropped.
#[derive(Debug)]
pub struct EtcdServer {
    child: Child,
    pub endpoint: String,
    options: ConnectOptions,
    _data: tempfile::TempDir,
}

impl EtcdServer {
    pub async fn start() -> Self {
        Self::start_plain(&[]).await
    }

    pub async fn start_plain(arguments: &[&str]) -> Self {
        Self::start_with(free_url(), ConnectOptions::new(), arguments).await
    }

    /// That asks for a certificate signed by `files`' authority.
    pub async fn start_tls(files: &Certificates, arguments: &[&str]) -> Self {
        let (ca, cert, key) = (files.path("ca.pem"), files.path("server.pem"), files.path("server.key"));
        let tls = ["--client-cert-auth", "--trusted-ca-file", &ca, "--cert-file", &cert, "--key-file", &key];
        let endpoint = free_url().replace("http:", "https:");
        Self::start_with(endpoint, files.options(), &[&tls, arguments].concat()).await
    }

    async fn start_with(endpoint: String, options: ConnectOptions, arguments: &[&str]) -> Self {
        let data = tempfile::tempdir().unwrap();
        let peer = free_url();
        let child = Command::new("etcd")
            .args(["--data-dir", data.path().to_str().unwrap()])
            .args(["--listen-client-urls", &endpoint, "--advertise-client-urls", &endpoint])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("default={peer}")])
            .args(["--heartbeat-interval", "50", "--election-timeout", "500"])
            .args(arguments)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| {
                panic!("cannot start `etcd`: {error}; install Debian's etcd-server to run this test")
            });
        let options = options.with_timeout(Duration::from_secs(2));
        let server = Self { child, endpoint, options, _data: data };
        let deadline = Instant::now() + PATIENCE;
        while let Err(error) = server.answers().await {
            assert!(Instant::now() < deadline, "etcd does not answer: {error}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        server
    }

    /// Without a user.
    pub async fn client(&self) -> Result<Client, Error> {
        Client::connect([&self.endpoint], Some(self.options.clone())).await
    }

    async fn answers(&self) -> Result<(), Error> {
        self.client().await?.get("/", None).await.map(drop)
    }

    /// From now on only `root` and those named here, with the part of the keys that each may use, may do anything.
    pub async fn enable_users(&self, users: &[(&str, &str, Permission)]) {
        let mut client = self.client().await.unwrap();
        client.user_add("root", "root's", None).await.unwrap();
        client.user_grant_role("root", "root").await.unwrap();
        for (user, password, permission) in users {
            client.user_add(*user, *password, None).await.unwrap();
            client.role_add(*user).await.unwrap();
            client.role_grant_permission(*user, permission.clone()).await.unwrap();
            client.user_grant_role(*user, *user).await.unwrap();
        }
        client.auth_enable().await.unwrap();
    }

    pub async fn root(&self) -> Client {
        let options = self.options.clone().with_user("root", "root's").with_auto_token_refresh(true);
        Client::connect([&self.endpoint], Some(options)).await.unwrap()
    }

    pub fn arguments(&self) -> Vec<&str> {
        let listen = ["--listen", "127.0.0.1:0", "--store", "etcd"];
        let etcd = ["--endpoints", &self.endpoint, "--etcd-lease-seconds", LEASE];
        [listen, etcd].concat()
    }

    pub fn daemon(&self) -> Daemon {
        Daemon::spawn(&self.arguments())
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn all_below(prefix: &str, may: PermissionType) -> Permission {
    Permission::new(may, prefix).with_prefix()
}

/// Every key below the prefix with its value and the revision it was last written at, and etcd's own revision.
pub async fn contents(client: &mut Client) -> (Vec<(String, Vec<u8>, i64)>, i64) {
    let found = client.get(PREFIX, Some(GetOptions::new().with_prefix())).await.unwrap();
    let revision = found.header().unwrap().revision();
    let keys = found.kvs().iter();
    let keys = keys.map(|kv| (kv.key_str().unwrap().to_owned(), kv.value().to_vec(), kv.mod_revision()));
    (keys.collect(), revision)
}

pub fn free_url() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    format!("http://{}", listener.local_addr().unwrap())
}

/// PEM files made for one test: an authority, and what it signed for the server and a client.
#[derive(Debug)]
pub struct Certificates(tempfile::TempDir);

impl Certificates {
    pub fn make() -> Self {
        let files = Self(tempfile::tempdir().unwrap());
        let mut authority = CertificateParams::default();
        authority.distinguished_name.push(DnType::CommonName, "reknit test authority");
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
        files.write("ca.pem", authority.pem());
        let names = vec!["127.0.0.1".to_owned(), "localhost".to_owned()];
        for (name, names, usage) in [
            ("server", names, vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth]),
            ("client", Vec::new(), vec![ExtendedKeyUsagePurpose::ClientAuth]),
        ] {
            let mut params = CertificateParams::new(names).unwrap();
            params.distinguished_name.push(DnType::CommonName, name);
            params.extended_key_usages = usage;
            let key = KeyPair::generate().unwrap();
            let signed = params.signed_by(&key, &authority).unwrap();
            files.write(&format!("{name}.pem"), signed.pem());
            files.write(&format!("{name}.key"), key.serialize_pem());
        }
        files
    }

    fn write(&self, name: &str, text: String) {
        std::fs::write(self.0.path().join(name), text).unwrap();
    }

    pub fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    pub fn dir(&self) -> &Path {
        self.0.path()
    }

    fn options(&self) -> ConnectOptions {
        let read = |name: &str| std::fs::read(PathBuf::from(self.path(name))).unwrap();
        let identity = Identity::from_pem(read("client.pem"), read("client.key"));
        let tls = TlsOptions::new().ca_certificate(Pem::from_pem(read("ca.pem"))).identity(identity);
        ConnectOptions::new().with_tls(tls)
    }
}
