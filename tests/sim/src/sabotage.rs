//! Deliberate breakages, to show that the checks bite.

/// What the daemons or the store do wrong.
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
}
