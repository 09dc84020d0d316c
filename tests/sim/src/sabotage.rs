//! Deliberate breakages, to show that the checks bite.

/// What the daemons, the store or the workers do wrong.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Sabotage {
    #[default]
    None,
    /// Records are not stored before what follows from them is ordered.
    SkipPersist,
    /// The store takes writes of leaders whose lease has ended, and they do not ask whether they lead.
    NoFencing,
    /// Whoever is ready is told to resume without waiting for the others.
    ResumeEarly,
    /// Plans count on what workers held once and do not hold any more.
    StaleHoldings,
    /// The job is taken for one that never committed a layout.
    ForgetCommits,
    /// Everyone is sent back some steps.
    StepsBack,
    /// Incidents name another GPU.
    BlameAnother,
    /// A worker does not fetch what it lacks, and goes on with whatever is in its buffers.
    KeepGarbage,
    /// A worker keeps what it gave to others.
    KeepAll,
    /// A worker makes room for the next epoch before that is committed.
    DropEarly,
    /// The worker of the first GPU takes a step that nobody decided.
    RunAhead,
    /// A worker does not sum the gradients of replicated parameters over the replicas.
    LocalReplicated,
    /// A worker's random stream depends on its slot.
    StreamOfSlot,
}
