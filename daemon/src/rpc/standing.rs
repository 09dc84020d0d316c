//! Leading or in stand-by, and what is answered then.

use super::Loop;
use crate::store::{Leader, Snapshot, Stored};
use reknit_client::LEADER;
use reknit_proto::v1;
use std::sync::Arc;
use tokio::sync::watch;
use tonic::Status;

/// What this daemon is now.
#[derive(Debug, Clone)]
pub enum Standing {
    StandBy,
    Leading(Loop),
}

/// The way to the loop, for every call.
#[derive(Debug, Clone)]
pub struct Gate {
    pub standing: watch::Receiver<Standing>,
    /// Where clients reach this daemon.
    pub address: String,
    /// What may be read in stand-by; `None` with a store that only the leader can read.
    pub stored: Option<Arc<Stored>>,
}

impl Gate {
    /// Of the daemon that leads.
    ///
    /// # Errors
    /// In stand-by: with the leader's address, in words and under the metadata key `reknit-leader`.
    pub async fn to_loop(&self) -> Result<Loop, Status> {
        let standing = self.standing.borrow().clone();
        match standing {
            Standing::Leading(to_loop) => Ok(to_loop),
            Standing::StandBy => Err(self.refusal().await),
        }
    }

    /// What the store holds, in stand-by.
    ///
    /// # Errors
    /// With the reason why it cannot be read.
    pub async fn stored(&self) -> Result<Option<Snapshot>, Status> {
        let leading = match *self.standing.borrow() {
            Standing::Leading(_) => true,
            Standing::StandBy => false,
        };
        match &self.stored {
            Some(stored) if !leading => {
                let snapshot = stored.snapshot().await;
                snapshot.map(Some).map_err(|error| {
                    Status::unavailable(format!(
                        "it is in stand-by, and what is stored cannot be read: {error} (options are reknitd's)"
                    ))
                })
            }
            Some(_) | None => Ok(None),
        }
    }

    pub async fn daemon(&self) -> v1::Daemon {
        let standing = self.standing.borrow().clone();
        let address = self.address.clone();
        match standing {
            Standing::Leading(to_loop) => v1::Daemon {
                role: v1::daemon::Role::Leading.into(),
                leader: address.clone(),
                address,
                term: to_loop.term,
            },
            Standing::StandBy => v1::Daemon {
                role: v1::daemon::Role::StandBy.into(),
                leader: match self.leader().await {
                    Leader::At(address) => address,
                    Leader::Nobody | Leader::Unknown(_) => String::new(),
                },
                address,
                term: 0,
            },
        }
    }

    /// A leadership that this daemon has just lost may be in the store still.
    async fn leader(&self) -> Leader {
        let Some(stored) = &self.stored else { return Leader::Nobody };
        match stored.leader().await {
            Leader::At(address) if address == self.address => Leader::Nobody,
            leader => leader,
        }
    }

    async fn refusal(&self) -> Status {
        match self.leader().await {
            Leader::At(leader) => {
                let mut status =
                    Status::unavailable(format!("this daemon is in stand-by: the leader is {leader}"));
                if let Ok(value) = leader.parse() {
                    status.metadata_mut().insert(LEADER, value);
                }
                status
            }
            Leader::Nobody => {
                Status::unavailable("this daemon is in stand-by, and nobody leads at present: try again")
            }
            Leader::Unknown(problem) => Status::unavailable(format!(
                "this daemon is in stand-by, and who leads is not known: {problem} (options are reknitd's)"
            )),
        }
    }
}
