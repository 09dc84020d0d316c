//! What operators wish, and how they ask for it.

use crate::daemon::{Daemon, Input};
use crate::net::MS;
use crate::world::{What, World};
use reknit_engine::{Event, State};

/// Jobs and GPUs by number.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Wish {
    Submit(usize),
    Stop(usize),
    Rebalance(usize),
    Drain(usize),
    Restore(usize),
}

impl World {
    pub(crate) fn wished(&mut self, wish: Wish, tries: u32) {
        let leads = |daemon: &Daemon| daemon.leading.is_some() && daemon.frozen_until <= self.now;
        let leader = (0..self.daemons.len()).find(|index| leads(&self.daemons[*index]));
        if let Some(leader) = leader {
            self.puts(leader, Input::Wish(wish));
            self.pump(leader);
        }
        // An operator sees whether it is done and asks again.
        let again = match wish {
            Wish::Submit(job) => !self.store.jobs.contains_key(&self.job_name(job)),
            Wish::Restore(gpu) => {
                self.store.jobs.values().any(|record| record.drained.contains_key(&self.gpus[gpu]))
            }
            Wish::Stop(_) | Wish::Rebalance(_) | Wish::Drain(_) => leader.is_none() && !self.healed,
        };
        if again && tries < 100 {
            self.at(200 * MS, What::Wished { wish, tries: tries + 1 });
        }
    }

    pub(crate) fn wish_of(&self, state: &State, wish: Wish) -> Option<Event> {
        let (refusal, event) = match wish {
            Wish::Submit(job) => {
                let spec = Box::new(self.cluster.jobs[job].clone());
                (state.refuse_submit(&spec), Event::Submit { spec })
            }
            Wish::Stop(job) => {
                let job = self.job_name(job);
                (state.refuse_stop(&job), Event::StopJob { job })
            }
            Wish::Rebalance(job) => {
                let job = self.job_name(job);
                (state.refuse_rebalance(&job), Event::Rebalance { job })
            }
            Wish::Drain(gpu) => {
                let gpu = self.gpus[gpu].clone();
                (state.refuse_drain(&gpu), Event::DrainGpu { gpu })
            }
            Wish::Restore(gpu) => {
                let gpu = self.gpus[gpu].clone();
                (state.refuse_restore(&gpu), Event::RestoreGpu { gpu })
            }
        };
        refusal.is_none().then_some(event)
    }
}
