//! What operators ask of the agent, through the daemon. Each request is answered once.

use super::{Agent, POWER, QUIESCED};
use crate::clock::Millis;
use crate::convert;
use crate::files;
use crate::health::Verdict;
use crate::power::Lease;
use crate::probe::protocol::ProbeOrder;
use crate::probe_keeper::KeeperOrder;
use crate::requests::{Answer, Awaited};
use reknit_layout::GpuId;
use reknit_proto::v1;
use std::time::Duration;
use tokio::time::sleep;
use tracing::{error, info, warn};

impl Agent {
    pub(super) fn answer(&mut self, answers: Vec<Answer>) {
        for (request, answer) in answers {
            info!(request, ?answer, "answered");
            self.send(convert::done(request, answer));
        }
    }

    /// The queue is kept free of what can be left out, so these find room.
    pub(super) fn order_probe(&mut self, order: KeeperOrder) {
        if let Err(e) = self.probe_orders.try_send(order) {
            error!(%e, "the probe's keeper takes no orders");
        }
    }

    /// Another reading of everything is left out while orders wait: the probe reads soon enough.
    pub(super) fn read_now(&mut self) {
        if self.probe_orders.capacity() == self.probe_orders.max_capacity() {
            self.order_probe(KeeperOrder::ToProbe(ProbeOrder::ReadNow));
        }
    }

    /// Until something must be done by itself.
    pub(super) fn due(&self) -> impl Future<Output = ()> + use<> {
        let power = self.power.next().filter(|_| !self.node.sight.sees_nothing());
        let times = [self.node.sight.quiesced_until(), power, self.requests.next()];
        let next = times.into_iter().flatten().min();
        let wait = next.map(|next| next.since(self.node.now()));
        async move {
            match wait {
                // Rounded up, so that it is over then.
                Some(wait) => sleep(wait + Duration::from_millis(1)).await,
                None => std::future::pending().await,
            }
        }
    }

    pub(super) fn do_due(&mut self) {
        let now = self.node.now();
        if self.node.sight.quiesced_until().is_some_and(|until| until <= now) {
            info!("the quiesce is over");
            self.resume();
        }
        let late = self.requests.late(now);
        self.answer(late);
        self.set_power_limits(now);
    }

    /// The probe's end closes every NVML handle; none is started before the quiesce is over.
    pub(super) fn quiesce(&mut self, request: u64, seconds: u32) {
        let now = self.node.now();
        info!(seconds, "quiesce");
        let until = now.after(Duration::from_secs(seconds.into()));
        self.node.sight.quiesced(until);
        files::save_json(&self.config.state_dir.join(QUIESCED), &until);
        self.requests.wait(now, request, Awaited::Quiesce { seconds });
        self.order_probe(KeeperOrder::Quiesce);
        let transitions =
            self.node.tracker.blind(now, "quiesced: an operator asked the agent to let go of the driver");
        self.report_health(transitions);
    }

    /// A quiesce outlives the agent.
    pub(super) fn stay_quiesced(&mut self) {
        let until: Option<Millis> = files::load_json(&self.config.state_dir.join(QUIESCED));
        if let Some(until) = until.filter(|until| *until > self.node.now()) {
            info!("the node is still quiesced");
            self.node.sight.quiesced(until);
        }
    }

    /// `confirmed`: the probe's exit was seen.
    pub(super) fn quiesced(&mut self, confirmed: bool) {
        self.replacing_probe = false;
        if confirmed {
            let answers = self.requests.quiesced();
            self.answer(answers);
        }
    }

    pub(super) fn end_quiesce(&mut self, request: u64) {
        let answer = match self.node.sight.quiesced_until() {
            Some(_) => {
                self.resume();
                Ok("the driver is read again".to_owned())
            }
            None => Err("the node is not quiesced".to_owned()),
        };
        self.answer(vec![(request, answer)]);
    }

    fn resume(&mut self) {
        self.node.sight.resumed();
        // It may be gone already, and one that is over counts for nothing.
        let _gone = std::fs::remove_file(self.config.state_dir.join(QUIESCED));
        let unconfirmed = self.requests.resumed();
        self.answer(unconfirmed);
        self.order_probe(KeeperOrder::Resume);
    }

    pub(super) fn set_power_limit(&mut self, order: v1::SetPowerLimit) {
        let v1::SetPowerLimit { request, gpu, limit_mw, lease_seconds: seconds } = order;
        let (now, gpu) = (self.node.now(), GpuId(gpu));
        let refused = if self.node.gpus.contains_key(&gpu) {
            self.blindness()
        } else {
            Some(format!("this node has no GPU {gpu}"))
        };
        if let Some(why) = refused {
            self.answer(vec![(request, Err(why))]);
            return;
        }
        let asked_mw = (limit_mw > 0).then_some(limit_mw);
        let until = now.after(Duration::from_secs(seconds.into()));
        let superseded = self.requests.power_limit(&gpu, &Err("another limit was asked for".to_owned()));
        self.answer(superseded);
        self.power.want(&gpu, asked_mw.map(|limit_mw| Lease { limit_mw, until }));
        self.requests.wait(now, request, Awaited::PowerLimit { gpu, asked_mw, seconds });
        self.set_power_limits(now);
    }

    /// Whatever is due. A lease is written down before the limit is set, so that the default is restored whatever happens.
    pub(super) fn set_power_limits(&mut self, now: Millis) {
        // No probe could: it is done when one reads.
        if self.node.sight.sees_nothing() {
            return;
        }
        let due = self.power.due(now);
        if due.is_empty() {
            return;
        }
        self.save_leases();
        for (gpu, limit) in due {
            info!(%gpu, limit, "power limit");
            self.order_probe(KeeperOrder::ToProbe(ProbeOrder::SetPowerLimit { gpu, limit }));
        }
    }

    pub(super) fn power_limit_set(&mut self, gpu: &GpuId, set: &Result<u32, String>) {
        match set {
            Ok(limit) => info!(%gpu, limit, "power limit set"),
            Err(why) => warn!(%gpu, why, "power limit not set"),
        }
        if !self.power.answered(self.node.now(), gpu, set.as_ref().ok().copied()) {
            return;
        }
        let answers = self.requests.power_limit(gpu, set);
        // Who asked is told that it was not set: it must not be set later. What it was before is not known.
        if set.is_err() && !answers.is_empty() {
            self.power.want(gpu, None);
        }
        self.answer(answers);
        self.save_leases();
    }

    fn save_leases(&self) {
        files::save_json(&self.config.state_dir.join(POWER), &self.power.kept());
    }

    pub(super) fn probe_now(&mut self, request: u64) {
        if let Some(why) = self.blindness() {
            self.answer(vec![(request, Err(why))]);
            return;
        }
        let missing = self.node.gpus.keys().cloned().collect();
        self.requests.wait(self.node.now(), request, Awaited::Readings { missing });
        self.order_probe(KeeperOrder::ToProbe(ProbeOrder::ReadNow));
    }

    /// Why no GPU can be read or set now.
    fn blindness(&self) -> Option<String> {
        self.node.sight.sees_nothing().then(|| self.node.sight.gaps().join("; "))
    }

    /// An operator's word lifts what the GPU waits for; what is wrong with it still is seen again.
    pub(super) fn release(&mut self, request: u64, gpu: &GpuId) {
        let answer = if self.node.gpus.contains_key(gpu) {
            let transition = self.node.tracker.release(self.node.now(), gpu);
            let lifted = transition.is_some();
            self.report_health(transition);
            self.save_memory();
            self.read_now();
            match self.node.tracker.verdict(gpu) {
                Some(Verdict { class, cause, rejoin, .. }) if class.takes_out() => {
                    Err(format!("{gpu} is still {}: {cause}; it may take part again {rejoin}", class.name()))
                }
                Some(verdict) if lifted => Ok(format!("{gpu} counts as {} now", verdict.class.name())),
                Some(verdict) => {
                    Err(format!("the agent does not hold {gpu} back: it is {}", verdict.class.name()))
                }
                None => Err(format!("{gpu} was not read yet")),
            }
        } else {
            Err(format!("this node has no GPU {gpu}"))
        };
        self.answer(vec![(request, answer)]);
    }
}
