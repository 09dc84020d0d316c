//! Model workers and agents.

use super::{Happening, Link, World, job_name};
use reknit_engine::*;
use reknit_layout::*;
use std::sync::Arc;

pub struct Process {
    pub node: NodeName,
    pub state: WorkerState,
    pub plan: Option<Arc<Plan>>,
    pub resume_step: Step,
    /// Stopped by a signal: does nothing, answers nothing, its sockets stay open.
    pub frozen: bool,
    pub ticks: u64,
    /// Those of the last report, and when they had grown.
    pub told_ticks: u64,
    pub moved: Time,
    /// Microseconds that it computes in a step, and in all steps so far.
    pub step_us: u64,
    pub computed_us: u64,
}

fn vote(step: Step) -> StepVote {
    StepVote { grad_norm_squared: 1.0, loss: 1.0 / step.0 as f64 }
}

pub fn killed() -> ExitStatus {
    ExitStatus { how: "killed by signal 9".to_owned(), signal: Some(9), status: None }
}

impl World {
    pub(super) fn agent_connects(&mut self, node: NodeName) {
        let link = Link::Agent(node.clone());
        if self.sessions.contains_key(&link) {
            return;
        }
        self.open(link.clone());
        let here = self.processes.iter().filter(|(_, p)| p.node == node);
        let workers = here.map(|(key, _)| (job_name(), key.clone(), 1)).collect();
        let gpus = self.agents[&node].clone();
        self.report(link, Event::AgentConnected { node: node.clone(), gpus, workers });
        for (_, key, exit) in self.ends.clone().into_iter().filter(|(of, ..)| *of == node) {
            self.report_exit(&node, &key, exit);
        }
    }

    pub(super) fn worker_connects(&mut self, key: &WorkerKey) {
        let link = Link::Worker(key.clone());
        let Some(process) = self.processes.get(key) else {
            return;
        };
        if self.sessions.contains_key(&link) || process.frozen {
            return;
        }
        let event = Event::WorkerConnected {
            job: job_name(),
            worker: key.clone(),
            node: process.node.clone(),
            endpoint: Endpoint { node: process.node.to_string(), unix: key.to_string(), tcp: String::new() },
            pid: 1,
            state: process.state.clone(),
        };
        self.open(link.clone());
        self.report(link, event);
    }

    pub(super) fn obey(&mut self, link: Link, order: Command) {
        match (link, order) {
            (Link::Agent(node), Command::Spawn { worker, .. }) => {
                let wait = 10 * self.some_delay();
                self.at(wait, Happening::ProcessStarts(worker, node));
            }
            (Link::Agent(node), Command::Fence { worker, .. }) => {
                if self.processes.contains_key(&worker) {
                    self.process_ends(&worker, killed());
                } else {
                    self.report_exit(&node, &worker, killed());
                }
            }
            (Link::Agent(_), other) => panic!("an agent was sent {other:?}"),
            (Link::Worker(key), order) => self.worker_obeys(&key, order),
        }
    }

    fn worker_obeys(&mut self, key: &WorkerKey, order: Command) {
        let Some(process) = self.processes.get_mut(key) else {
            return;
        };
        if process.frozen {
            return;
        }
        let state = &mut process.state;
        match order {
            Command::CloseEpoch { epoch, .. } => {
                let ahead =
                    state.phase == WorkerPhase::Training && state.epoch > epoch || state.ready_epoch > epoch;
                if !ahead {
                    self.quiesce(key);
                }
            }
            Command::Pause { epoch, .. } => match state.phase {
                WorkerPhase::Training if state.epoch == epoch => {
                    // The boundary after the step that the furthest is in.
                    let all = self.processes.values().map(|process| &process.state);
                    let furthest = all
                        .filter(|state| state.epoch == epoch)
                        .map(|state| state.attempted)
                        .max()
                        .expect("itself");
                    self.pause_after.entry(epoch).or_insert(furthest);
                }
                WorkerPhase::Quiesced | WorkerPhase::Completed => self.send_quiesced(key),
                other => panic!("paused in {other:?}"),
            },
            Command::Prepare { epoch, plan, resume_step, vote: given, participants, .. } => {
                assert!(epoch > state.epoch && epoch >= state.ready_epoch, "ONE-EPOCH");
                assert!(state.phase != WorkerPhase::Training, "prepared while training");
                let holds = !state.holding.units.is_empty();
                let rolls = holds && state.prepared == resume_step && state.holding.step < resume_step;
                let is_source = plan.transfers.iter().any(|t| t.from == *key);
                if rolls {
                    assert_eq!(given, Some(vote(resume_step)), "rolled forward with a wrong vote");
                    state.holding.step = resume_step;
                    state.vote = given;
                }
                if is_source {
                    assert_eq!(state.holding.step, resume_step, "SAME-STEP of a source");
                }
                assert!(participants.iter().any(|p| p.worker == *key));
                state.phase = WorkerPhase::Preparing;
                state.ready_epoch = epoch;
                process.plan = Some(plan);
                process.resume_step = resume_step;
                if rolls {
                    self.send_committed(key, epoch, resume_step, true);
                }
                let wait = 5 * self.some_delay();
                self.at(wait, Happening::GetsReady(key.clone(), epoch));
            }
            Command::Resume { epoch, .. } => {
                if state.phase == WorkerPhase::Training && state.epoch == epoch {
                    return;
                }
                assert_eq!((state.phase, state.ready_epoch), (WorkerPhase::Ready, epoch));
                let plan = process.plan.clone().expect("a plan");
                let place = plan.layout.place_of(key).expect("a place");
                let group = plan.layout.group(place.replica, place.stage).expect("a group");
                state.epoch = epoch;
                state.ready_epoch = Epoch(0);
                state.holding = Holding { step: process.resume_step, units: group.owned(place.slot).into() };
                state.prepared = process.resume_step;
                state.attempted = process.resume_step;
                if process.resume_step.0 > 0 {
                    state.vote = Some(vote(process.resume_step));
                }
                state.phase = WorkerPhase::Training;
                self.checks.resumes(epoch, self.processes[key].resume_step);
                self.go_on(key);
            }
            Command::Stop { .. } => {
                let exit = ExitStatus { how: "exit status 0".to_owned(), signal: None, status: Some(0) };
                let wait = self.some_delay();
                self.at(wait, Happening::ProcessEnds(key.clone(), exit));
            }
            other => panic!("a worker was sent {other:?}"),
        }
    }

    pub(super) fn process_starts(&mut self, key: WorkerKey, node: NodeName) {
        let process = Process {
            node: node.clone(),
            state: WorkerState {
                phase: WorkerPhase::Idle,
                epoch: Epoch(0),
                ready_epoch: Epoch(0),
                holding: Holding::default(),
                prepared: Step(0),
                attempted: Step(0),
                vote: None,
            },
            plan: None,
            resume_step: Step(0),
            frozen: false,
            ticks: 0,
            told_ticks: 0,
            moved: self.now,
            step_us: 20_000,
            computed_us: 0,
        };
        self.processes.insert(key.clone(), process);
        let spawned =
            Event::WorkerSpawned { node: node.clone(), job: job_name(), worker: key.clone(), pid: 1 };
        self.report(Link::Agent(node), spawned);
        let wait = 10 * self.some_delay();
        self.at(wait, Happening::WorkerConnects(key));
    }

    fn report_exit(&mut self, node: &NodeName, key: &WorkerKey, exit: ExitStatus) {
        let event = Event::WorkerExited { node: node.clone(), job: job_name(), worker: key.clone(), exit };
        self.report(Link::Agent(node.clone()), event);
    }

    pub fn process_ends(&mut self, key: &WorkerKey, exit: ExitStatus) {
        let Some(process) = self.processes.remove(key) else {
            return;
        };
        self.ends.push((process.node.clone(), key.clone(), exit.clone()));
        self.report_exit(&process.node, key, exit);
        self.cut_worker(key);
        let peers: Vec<_> = self
            .processes
            .iter()
            .filter(|(_, peer)| peer.state.epoch == process.state.epoch)
            .map(|(key, _)| key.clone())
            .collect();
        for peer in peers {
            let wait = 3 * self.some_delay();
            self.at(wait, Happening::NoticesFailure(peer, process.state.epoch));
        }
    }

    /// Its session ends; what was under way in it is lost.
    pub fn cut_worker(&mut self, key: &WorkerKey) {
        if self.sessions.remove(&Link::Worker(key.clone())).is_some() {
            let event = Event::WorkerDisconnected { job: job_name(), worker: key.clone() };
            self.tell(event);
        }
    }

    pub(super) fn notices_failure(&mut self, key: &WorkerKey, epoch: Epoch) {
        let Some(process) = self.processes.get(key) else {
            return;
        };
        let state = &process.state;
        if process.frozen || state.phase != WorkerPhase::Training || state.epoch != epoch {
            return;
        }
        let event = Event::PlaneFailed {
            job: job_name(),
            worker: key.clone(),
            epoch,
            peer: None,
            reason: "a peer's socket ended".to_owned(),
            timed_out: false,
        };
        self.report(Link::Worker(key.clone()), event);
        self.quiesce(key);
    }

    fn quiesce(&mut self, key: &WorkerKey) {
        if let Some(process) = self.processes.get_mut(key) {
            let state = &mut process.state;
            state.ready_epoch = Epoch(0);
            state.phase = if state.epoch == Epoch(0) { WorkerPhase::Idle } else { WorkerPhase::Quiesced };
        }
        self.send_quiesced(key);
    }

    fn send_quiesced(&mut self, key: &WorkerKey) {
        if let Some(process) = self.processes.get(key) {
            let event =
                Event::Quiesced { job: job_name(), worker: key.clone(), state: process.state.clone() };
            self.report(Link::Worker(key.clone()), event);
        }
    }

    /// The next step, or the end.
    fn go_on(&mut self, key: &WorkerKey) {
        let last = self.last_step();
        let Some(process) = self.processes.get_mut(key) else {
            return;
        };
        let (epoch, done) = (process.state.epoch, process.state.holding.step);
        if done.0 >= last {
            process.state.phase = WorkerPhase::Completed;
            let event = Event::Completed {
                job: job_name(),
                worker: key.clone(),
                epoch,
                step: done,
                replicated_digest: format!("digest at {done}"),
            };
            self.report(Link::Worker(key.clone()), event);
            return;
        }
        process.state.attempted = Step(done.0 + 1);
        let wait = self.step_time / 2 + self.random.below(self.step_time);
        self.at(wait, Happening::Prepared(key.clone(), epoch, Step(done.0 + 1)));
    }

    fn last_step(&self) -> u64 {
        self.store[&job_name()].spec.run.steps
    }

    fn members_of(&self, key: &WorkerKey) -> Vec<WorkerKey> {
        let plan = self.processes[key].plan.as_ref().expect("a plan");
        let members = plan.layout.members();
        members.map(|(_, member)| member.worker.clone()).collect()
    }

    pub(super) fn prepared(&mut self, key: &WorkerKey, epoch: Epoch, step: Step) {
        let Some(process) = self.processes.get_mut(key) else {
            return;
        };
        let state = &mut process.state;
        let current = state.phase == WorkerPhase::Training && state.epoch == epoch;
        if !current || state.attempted != step || process.frozen {
            return;
        }
        state.prepared = step;
        process.ticks += 1;
        let votes = self.votes_in.entry((epoch, step)).or_default();
        votes.insert(key.clone());
        let all = self.members_of(key);
        if all.iter().all(|member| self.votes_in[&(epoch, step)].contains(member)) {
            for member in all {
                let wait = 3 * self.some_delay();
                self.at(wait, Happening::Commits(member, epoch, step));
            }
        }
    }

    pub(super) fn commits(&mut self, key: &WorkerKey, epoch: Epoch, step: Step) {
        let Some(process) = self.processes.get_mut(key) else {
            return;
        };
        let state = &mut process.state;
        let current = state.phase == WorkerPhase::Training && state.epoch == epoch;
        if !current || state.prepared != step || process.frozen {
            return;
        }
        state.holding.step = step;
        state.vote = Some(vote(step));
        process.ticks += 1;
        process.computed_us += process.step_us;
        self.checks.commits(epoch, step);
        self.send_committed(key, epoch, step, false);
        match self.pause_after.get(&epoch) {
            // At the last step there is nothing left to pause.
            Some(last) if step >= *last && step.0 < self.last_step() => self.quiesce(key),
            Some(_) | None => self.go_on(key),
        }
    }

    fn send_committed(&mut self, key: &WorkerKey, epoch: Epoch, step: Step, rolled: bool) {
        // The samples are those of the layout the step was run under.
        let process = &self.processes[key];
        let run_under = process.state.epoch;
        let layouts = self.store[&job_name()].layout.as_deref().into_iter();
        let plan_layout = process.plan.iter().map(|plan| &plan.layout);
        let layout = layouts.chain(plan_layout).find(|layout| layout.epoch == run_under);
        let Some(layout) = layout else { return };
        let Some(place) = layout.place_of(key) else { return };
        let range = layout.samples_of(place.replica);
        let event = Event::Committed {
            job: job_name(),
            worker: key.clone(),
            epoch: if rolled { run_under } else { epoch },
            step,
            vote: vote(step),
            first_sample: (step.0 - 1) * 8 + u64::from(range.start),
            samples: range.end - range.start,
            step_ms: 50,
            tokens: 128,
            rolled_forward: rolled,
        };
        self.report(Link::Worker(key.clone()), event);
    }

    pub(super) fn gets_ready(&mut self, key: &WorkerKey, epoch: Epoch) {
        let Some(process) = self.processes.get(key) else {
            return;
        };
        let state = &process.state;
        if process.frozen || state.phase != WorkerPhase::Preparing || state.ready_epoch != epoch {
            return;
        }
        let plan = process.plan.as_ref().expect("a plan");
        let layout = &plan.layout;
        let sources = plan.transfers.iter().filter(|t| t.to == *key).map(|t| &t.from);
        let peers = layout.members().map(|(_, member)| &member.worker);
        let missing =
            peers.chain(sources).find(|peer| self.processes.get(*peer).is_none_or(|peer| peer.frozen));
        let digest = match self.lie_about_digests {
            true => format!("digest of {key}"),
            false => format!("digest at {}", process.resume_step),
        };
        let event = match missing {
            Some(peer) => Event::PrepareFailed {
                job: job_name(),
                worker: key.clone(),
                epoch,
                peer: Some(peer.clone()),
                reason: "a peer does not answer".to_owned(),
            },
            None if layout.place_of(key).is_none() => return,
            None => Event::Ready {
                job: job_name(),
                worker: key.clone(),
                epoch,
                step: process.resume_step,
                replicated_digest: digest,
                bytes_received: 0,
            },
        };
        if matches!(event, Event::Ready { .. }) {
            self.checks.ready.entry(epoch).or_default().insert(key.clone());
            if let Some(process) = self.processes.get_mut(key) {
                process.state.phase = WorkerPhase::Ready;
            }
        }
        self.report(Link::Worker(key.clone()), event);
    }

    /// Progress of everyone who makes some. A frozen peer holds the others up: they tell of it, and in the end their
    /// plane times out.
    pub(super) fn heartbeat(&mut self) {
        let keys: Vec<_> = self.processes.keys().cloned().collect();
        let frozen = self.processes.iter().filter(|(_, process)| process.frozen);
        let frozen: Vec<_> = frozen.map(|(key, process)| (key.clone(), process.state.epoch)).collect();
        for key in keys {
            let Some(process) = self.processes.get_mut(&key) else {
                continue;
            };
            let state = &process.state;
            if process.frozen || state.phase != WorkerPhase::Training {
                continue;
            }
            let mut activity = Activity { computed_us: process.computed_us, ..Activity::default() };
            if process.ticks != process.told_ticks {
                process.told_ticks = process.ticks;
                process.moved = self.now;
            } else {
                let missing = frozen.iter().filter(|(_, epoch)| *epoch == state.epoch);
                activity.waiting_for = missing.map(|(key, _)| key.clone()).collect();
                activity.waiting_ms = ((self.now.0 - process.moved.0) / super::MS) as u32;
                activity.part = Some(StepPart::Vote);
            }
            let event = Event::Progress {
                job: job_name(),
                worker: key.clone(),
                epoch: state.epoch,
                step: state.holding.step,
                ticks: process.ticks,
                activity,
            };
            self.report(Link::Worker(key), event);
        }
        self.at(100 * super::MS, Happening::Heartbeat);
    }
}
