//! An etcd of three members on this machine, each a real process, on loopback.

use crate::lab::eventually;
use crate::process::signal;
use anyhow::{Context, Result, ensure};
use etcd_client::{Client, ConnectOptions};
use rustix::process::Signal;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

pub const MEMBERS: usize = 3;

/// Ended when dropped.
#[derive(Debug)]
pub struct Etcd {
    dir: TempDir,
    cluster: String,
    members: Vec<Member>,
}

#[derive(Debug)]
struct Member {
    name: String,
    client: String,
    peer: String,
    process: Option<Child>,
}

impl Etcd {
    /// Returns when all members answer.
    pub async fn start() -> Result<Self> {
        let ports = free_ports(2 * MEMBERS)?;
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let members: Vec<_> = (0..MEMBERS)
            .map(|number| Member {
                name: format!("m{number}"),
                client: url(ports[number]),
                peer: url(ports[MEMBERS + number]),
                process: None,
            })
            .collect();
        let cluster: Vec<_> =
            members.iter().map(|member| format!("{}={}", member.name, member.peer)).collect();
        let mut etcd = Self { dir: tempfile::tempdir()?, cluster: cluster.join(","), members };
        for number in 0..MEMBERS {
            etcd.start_member(number)?;
        }
        eventually("all members of etcd to agree", async || Ok(etcd.find_leader().await.is_some())).await?;
        Ok(etcd)
    }

    /// As reknitd takes them.
    pub fn endpoints(&self) -> String {
        let urls: Vec<_> = self.members.iter().map(|member| member.client.as_str()).collect();
        urls.join(",")
    }

    pub async fn client(&self) -> Result<Client> {
        let urls: Vec<_> = self.members.iter().map(|member| member.client.as_str()).collect();
        let options = ConnectOptions::new().with_timeout(Duration::from_secs(1));
        Ok(Client::connect(urls, Some(options)).await?)
    }

    /// For the first time, or after its end: it keeps its data.
    pub fn start_member(&mut self, number: usize) -> Result<()> {
        let member = &mut self.members[number];
        let log = std::fs::File::create(self.dir.path().join(format!("{}.log", member.name)))?;
        let process = Command::new("etcd")
            .args(["--name", &member.name, "--data-dir"])
            .arg(self.dir.path().join(&member.name))
            .args(["--listen-client-urls", &member.client, "--advertise-client-urls", &member.client])
            .args(["--listen-peer-urls", &member.peer, "--initial-advertise-peer-urls", &member.peer])
            .args(["--initial-cluster", &self.cluster])
            // Members of another test that had these ports before are refused.
            .args(["--initial-cluster-token", &self.dir.path().display().to_string()])
            .args(["--heartbeat-interval", "50", "--election-timeout", "500"])
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("cannot start `etcd`: install Debian's etcd-server to run this test")?;
        member.process = Some(process);
        Ok(())
    }

    /// The member that leads, once all that run agree on it.
    pub async fn leader(&self) -> Result<usize> {
        let mut leader = None;
        eventually("etcd to have a leader", async || {
            leader = self.find_leader().await;
            Ok(leader.is_some())
        })
        .await?;
        leader.context("just seen")
    }

    async fn find_leader(&self) -> Option<usize> {
        let mut ids = Vec::new();
        let mut leader = 0;
        for member in self.members.iter().filter(|member| member.process.is_some()) {
            let (id, named) = status(&member.client).await.ok()?;
            ids.push((id, member));
            if named == 0 || (leader != 0 && leader != named) {
                return None;
            }
            leader = named;
        }
        let (_, leads) = ids.into_iter().find(|(id, _)| *id == leader)?;
        self.members.iter().position(|member| member.name == leads.name)
    }

    /// kill -9, confirmed.
    pub fn kill_member(&mut self, number: usize) -> Result<()> {
        let mut process = self.members[number].process.take().context("the member runs")?;
        process.kill()?;
        ensure!(!process.wait()?.success(), "the member was killed");
        Ok(())
    }

    /// To so many members that the others are no quorum.
    pub fn signal_quorum(&self, with: Signal) -> Result<()> {
        for member in &self.members[..=MEMBERS / 2] {
            signal(member.process.as_ref().context("the member runs")?.id(), with)?;
        }
        Ok(())
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        for process in self.members.iter_mut().filter_map(|member| member.process.as_mut()) {
            // It may have ended already.
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// A member's own number, and that of its leader.
async fn status(url: &str) -> Result<(u64, u64), etcd_client::Error> {
    let limit = Duration::from_secs(1);
    let options = ConnectOptions::new().with_connect_timeout(limit).with_timeout(limit);
    let status = Client::connect([url], Some(options)).await?.status().await?;
    Ok((status.header().map_or(0, |header| header.member_id()), status.leader()))
}

/// Different from each other and free just now.
pub fn free_ports(count: usize) -> Result<Vec<u16>> {
    let listeners: Vec<_> = (0..count).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<Result<_, _>>()?;
    Ok(listeners
        .iter()
        .map(|listener| listener.local_addr().map(|address| address.port()))
        .collect::<Result<_, _>>()?)
}
