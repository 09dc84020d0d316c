//! Joining the groups of an epoch to come in the background, on a thread of its own, while the worker trains or opens its
//! data. The order to prepare that epoch then finds them joined.

use crate::data::Corpus;
use crate::groups::{Joined, Joiner, join_all};
use crate::messages::{Prepare, Report};
use crate::pace::Pace;
use crate::rank::{RankError, Setting};
use crate::session::Outbox;
use reknit_layout::Epoch;
use reknit_model::Real;
use reknit_plane::Element;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// How the session's thread has groups joined: it can once the worker's data is open, and is not asked before.
#[derive(Default)]
pub struct Summons(OnceLock<Box<dyn Fn(Arc<Prepare>) + Send + Sync>>);

impl std::fmt::Debug for Summons {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Summons")
    }
}

impl Summons {
    pub fn answer_with<T: Real + Element>(&self, joins: Arc<Joins<T>>, outbox: Arc<Outbox>) {
        let order = move |prepare| joins.order(prepare, &outbox);
        // There is one rank in a worker.
        let _ = self.0.set(Box::new(order));
    }

    pub fn call(&self, prepare: Arc<Prepare>) {
        match self.0.get() {
            Some(order) => order(prepare),
            None => tracing::warn!("an order to join came before the data was open; ignored"),
        }
    }
}

/// What is joined ahead of its time: one epoch at most.
#[derive(Debug)]
pub struct Joins<T> {
    setting: Setting,
    corpus: Arc<Corpus>,
    inner: Mutex<Inner<T>>,
}

#[derive(Debug)]
struct Inner<T> {
    /// Nothing before it is joined any more.
    newest: Epoch,
    /// The epoch that is joined ahead.
    ahead: Option<Epoch>,
    /// Its groups.
    joined: Option<Joined<T>>,
}

impl<T: Real + Element> Joins<T> {
    pub(crate) fn new(setting: Setting, corpus: Arc<Corpus>) -> Self {
        Self { setting, corpus, inner: Mutex::new(Inner { newest: Epoch(0), ahead: None, joined: None }) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner<T>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to join these groups; what was joined before is over. Reports [`Report::Joined`], or why not.
    pub fn order(self: &Arc<Self>, prepare: Arc<Prepare>, outbox: &Arc<Outbox>) {
        let epoch = prepare.epoch;
        let mut inner = self.lock();
        if epoch <= inner.newest {
            return;
        }
        self.end(&mut inner);
        (inner.newest, inner.ahead) = (epoch, Some(epoch));
        drop(inner);
        let (joins, reports) = (Arc::clone(self), Arc::clone(outbox));
        let thread = std::thread::Builder::new().name("joins".to_owned());
        let started = thread.spawn(move || {
            let joined = join(&joins.setting, &joins.corpus, &prepare, &Arc::default());
            joins.take_in(epoch, joined, &reports);
        });
        if let Err(error) = started {
            let reason = format!("cannot start a thread to join with: {error}");
            outbox.push(Report::PrepareFailed { epoch, reason, peer: None });
        }
    }

    fn take_in(&self, epoch: Epoch, joined: Result<Joined<T>, RankError>, outbox: &Outbox) {
        let mut inner = self.lock();
        if inner.ahead != Some(epoch) {
            return;
        }
        match joined {
            Ok(joined) => {
                inner.joined = Some(joined);
                outbox.push(Report::Joined { epoch });
            }
            Err(error) => {
                // Whoever is further must not wait for this one.
                self.setting.aborts.abort_siblings(epoch);
                tracing::warn!(%epoch, %error, "cannot join");
                let peer = error.plane().and_then(|error| error.peer.clone());
                outbox.push(Report::PrepareFailed { epoch, reason: error.to_string(), peer });
            }
        }
    }

    /// The groups of the epoch, if they are joined. Those of another one are over.
    pub(crate) fn take(&self, epoch: Epoch) -> Option<Joined<T>> {
        let mut inner = self.lock();
        inner.newest = inner.newest.max(epoch);
        if inner.ahead == Some(epoch) && inner.joined.is_some() {
            // They are the rank's own from now on.
            inner.ahead = None;
            return inner.joined.take();
        }
        self.end(&mut inner);
        None
    }

    /// Also cuts short what is being joined.
    fn end(&self, inner: &mut Inner<T>) {
        inner.joined = None;
        if let Some(epoch) = inner.ahead.take() {
            self.setting.aborts.abort_siblings(epoch);
            self.setting.plane.abort_joins(epoch.0);
        }
    }
}

/// Joins everything of the epoch and sees that all read the same data.
///
/// # Errors
/// When a group does not come about, or this worker's data differs from that of the others.
pub(crate) fn join<T: Real + Element>(
    setting: &Setting,
    corpus: &Corpus,
    prepare: &Prepare,
    pace: &Arc<Pace>,
) -> Result<Joined<T>, RankError> {
    let joiner = Joiner {
        job: &setting.job,
        me: &setting.worker,
        prepare,
        timeouts: setting.timeouts,
        pace,
        aborts: &setting.aborts,
    };
    let mut joined = join_all(joiner, &*setting.plane)?;
    if let Some(team) = &mut joined.team {
        // Ranks that read other texts under the same numbers would train a wrong model without a word.
        let nominal = setting.job.parallel.tensor as usize;
        corpus.check_against(&team.gather(corpus.fingerprint(), nominal)?)?;
    }
    Ok(joined)
}
