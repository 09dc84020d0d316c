//! An etcd with TLS and users: who is let in, who is refused and how that reads.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use etcd_client::PermissionType;
use rustix::process::Signal;
use std::time::Duration;
use support::etcd::{Certificates, EtcdServer, PREFIX, all_below, contents};
use support::{Daemon, job_names, submit};

const PASSWORD: &str = "open-sesame-4711";

/// An etcd that lets in `daemon` with all below the prefix, `reader` with reading alone, and `guest` elsewhere.
struct Guarded {
    files: Certificates,
    etcd: EtcdServer,
}

impl Guarded {
    /// Tokens end after so many seconds without use.
    async fn start(token_seconds: &str) -> Self {
        let files = Certificates::make();
        let etcd =
            EtcdServer::start_tls(&files, &["--auth-token-ttl", token_seconds, "--bcrypt-cost", "4"]).await;
        etcd.enable_users(&[
            ("daemon", PASSWORD, all_below(PREFIX, PermissionType::Readwrite)),
            ("reader", PASSWORD, all_below(PREFIX, PermissionType::Read)),
            ("guest", PASSWORD, all_below("/guest/", PermissionType::Readwrite)),
        ])
        .await;
        std::fs::write(files.dir().join("password"), format!("{PASSWORD}\n")).unwrap();
        Self { files, etcd }
    }

    /// As an operator gives them, with some changed: `--etcd-ca`, ... . An empty value leaves the flag out.
    fn arguments(&self, changes: &[(&str, &str)]) -> Vec<String> {
        let usual = [
            ("--endpoints", self.etcd.endpoint.clone()),
            ("--etcd-ca", self.files.path("ca.pem")),
            ("--etcd-cert", self.files.path("client.pem")),
            ("--etcd-key", self.files.path("client.key")),
            ("--etcd-user", "daemon".to_owned()),
            ("--etcd-password-file", self.files.path("password")),
        ];
        let mut arguments: Vec<String> = self.etcd.arguments().into_iter().map(str::to_owned).collect();
        arguments.drain(4..6);
        for (flag, value) in usual {
            let change = changes.iter().find(|(changed, _)| *changed == flag);
            let value = change.map_or(value, |(_, value)| (*value).to_owned());
            if !value.is_empty() {
                arguments.extend([flag.to_owned(), value]);
            }
        }
        arguments
    }

    fn daemon(&self, changes: &[(&str, &str)]) -> Daemon {
        let arguments = self.arguments(changes);
        Daemon::spawn(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_refusal_is_one_line_that_says_what_to_do() {
    let guarded = Guarded::start("300").await;
    let other = Certificates::make();
    let wrong = guarded.files.path("wrong");
    std::fs::write(&wrong, "not-it").unwrap();
    let empty = guarded.files.path("empty");
    std::fs::write(&empty, "\n").unwrap();
    let (plain, other_ca) = (guarded.etcd.endpoint.replace("https:", "http:"), other.path("ca.pem"));
    let (other_cert, other_key) = (other.path("client.pem"), other.path("client.key"));
    let before = contents(&mut guarded.etcd.root().await).await;
    type Case<'a> = (&'a str, &'a [(&'a str, &'a str)], i32, &'a [&'a str]);
    let nobody = [("--etcd-user", ""), ("--etcd-password-file", "")];
    let bare = [("--etcd-cert", ""), ("--etcd-key", "")];
    let http = [("--etcd-ca", ""), bare[0], bare[1], ("--endpoints", plain.as_str())];
    let cases: &[Case<'_>] = &[
        (
            "wrong password",
            &[("--etcd-password-file", &wrong)],
            77,
            &["invalid user ID or password", "--etcd-password-file"],
        ),
        ("unknown user", &[("--etcd-user", "nobody")], 77, &["invalid user ID or password", "--etcd-user"]),
        // etcd takes the name in the certificate then.
        ("no user", &nobody, 77, &["permission denied", "--etcd-user"]),
        (
            "may not read",
            &[("--etcd-user", "guest")],
            77,
            &["permission denied", "grant-permission", "--etcd-prefix"],
        ),
        ("may not write", &[("--etcd-user", "reader")], 77, &["permission denied", "grant-permission"]),
        ("another authority", &[("--etcd-ca", &other_ca)], 69, &["invalid peer certificate", "--etcd-ca"]),
        ("no authority", &[("--etcd-ca", ""), bare[0], bare[1]], 64, &["etcd.ca", "--etcd-ca"]),
        ("no certificate", &bare, 69, &["cannot be reached", "--etcd-cert"]),
        (
            "another's certificate",
            &[("--etcd-cert", &other_cert), ("--etcd-key", &other_key)],
            69,
            &["cannot be reached", "--etcd-cert"],
        ),
        ("a key that is none", &[("--etcd-key", &wrong)], 69, &["--etcd-key"]),
        ("http for https", &http, 69, &["https://"]),
        (
            "no password file",
            &[("--etcd-password-file", "/no/such/file")],
            64,
            &["/no/such/file", "etcd.password_file"],
        ),
        ("empty password file", &[("--etcd-password-file", &empty)], 64, &["is empty"]),
    ];
    for (what, changes, wanted_status, wanted) in cases {
        let (status, last) = guarded.daemon(changes).exit();
        println!("{what}: {status}: {last}");
        assert_eq!(status, *wanted_status, "{what}: {last}");
        assert!(last.starts_with("reknitd: "), "{what}: {last}");
        for words in *wanted {
            assert!(last.contains(words), "{what}: `{words}` is not in {last}");
        }
        assert!(!last.contains(PASSWORD) && !last.contains("not-it"), "{what}: {last}");
    }
    let (keys, _) = contents(&mut guarded.etcd.root().await).await;
    assert_eq!(keys, before.0, "something was written");
}

/// A token that nobody uses ends, and one of a member that restarts.
#[tokio::test(flavor = "multi_thread")]
async fn daemons_lead_stand_by_and_write_long_after_their_tokens_ended() {
    let guarded = Guarded::start("1").await;
    let mut first = guarded.daemon(&[]);
    first.wait_until_serving();
    let mut admin = first.admin().await;
    submit(&mut admin, "one").await;
    let mut second = guarded.daemon(&[]);
    second.wait_until_standing_by();

    // What is tested is that time.
    tokio::time::sleep(Duration::from_secs(4)).await;
    submit(&mut admin, "two").await;
    let mut waiting = second.admin().await;
    assert_eq!(job_names(&mut waiting).await, ["one", "two"]);
    let refused = waiting.list_nodes(reknit_proto::v1::ListNodesRequest {}).await.unwrap_err();
    assert_eq!(reknit_client::leader(&refused), Some(format!("http://{}", first.address).as_str()));
    let mut third = guarded.daemon(&[]);
    third.wait_for_log("waiting to lead");
    tokio::time::sleep(Duration::from_secs(3)).await;
    first.signal(Signal::TERM);
    drop((admin, waiting));
    assert_eq!(first.exit().0, 0);
    second.wait_until_serving();
    submit(&mut second.admin().await, "three").await;
    second.kill();
    third.wait_until_serving();
    let mut admin = third.admin().await;
    assert_eq!(job_names(&mut admin).await, ["one", "three", "two"]);
    submit(&mut admin, "four").await;
    drop(admin);
    third.signal(Signal::TERM);
    third.wait_for_log("stopping");
    let log = third.log.join("\n");
    assert!(!log.contains(PASSWORD), "{log}");
}
