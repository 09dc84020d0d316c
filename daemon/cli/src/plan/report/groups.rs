//! The groups that change: their degree and what each slot owns, before and after.

use super::{MOST_GROUPS, MOST_SLOTS, count};
use crate::plan::answer::Answer;
use crate::plan::runs::{Run, ascending, runs};
use crate::table::Table;
use reknit_layout::{Axis, Family, Group, Place, Slot, Units};
use std::collections::BTreeSet;

pub(super) fn lines(answer: &Answer<'_>) -> Vec<String> {
    let groups = &answer.plan.layout.groups;
    let changed: Vec<_> =
        groups.iter().map(|group| Change::of(answer, group)).filter(Change::is_one).collect();
    let mut lines = Vec::new();
    for change in changed.iter().take(MOST_GROUPS) {
        if !lines.is_empty() {
            lines.push(String::new());
        }
        lines.extend(change.lines(answer));
    }
    if changed.len() > MOST_GROUPS {
        lines.push(String::new());
        let more = changed.len() - MOST_GROUPS;
        lines.push(format!("{} change too; --format json has all", count(more, "more group")));
    }
    if !changed.is_empty() {
        lines.push(String::new());
        lines.push("█ trains  + joins  × failed  - leaves  ░ idle; units: before -> after".to_owned());
    }
    lines
}

/// What becomes of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// Trained and trains.
    Stays,
    /// Held nothing of this stage: it returns, is a spare, or comes from another stage.
    Joins,
    Failed,
    Leaves,
    Idle,
}

impl Fate {
    fn of(answer: &Answer<'_>, place: Place, active: bool) -> Self {
        let held = answer.held(place).is_some();
        let sat = |places: &BTreeSet<Place>| answer.origin(place).is_some_and(|at| places.contains(&at));
        match (active, held) {
            (true, true) => Self::Stays,
            (true, false) => Self::Joins,
            (false, _) if sat(&answer.losses.failed) => Self::Failed,
            (false, _) if sat(&answer.losses.drained) => Self::Leaves,
            (false, _) => Self::Idle,
        }
    }

    fn picture(self) -> char {
        match self {
            Self::Stays => '█',
            Self::Joins => '+',
            Self::Failed => '×',
            Self::Leaves => '-',
            Self::Idle => '░',
        }
    }

    fn word(self) -> &'static str {
        match self {
            Self::Stays => "trains",
            Self::Joins => "joins",
            Self::Failed => "failed",
            Self::Leaves => "leaves",
            Self::Idle => "idle",
        }
    }
}

struct Change<'a> {
    group: &'a Group,
    fates: Vec<Fate>,
    /// Per axis and slot the units before, and those after.
    axes: Vec<(Axis, Vec<(Owned<'a>, Owned<'a>)>)>,
}

/// `None`: nothing.
type Owned<'a> = Option<&'a Units>;

impl<'a> Change<'a> {
    fn of(answer: &'a Answer<'_>, group: &'a Group) -> Self {
        let place = |slot| group.place(Slot(slot));
        let slots = || (0..).zip(&group.slots);
        let fates = slots().map(|(slot, member)| Fate::of(answer, place(slot), member.is_some()));
        let held: Vec<_> = slots().map(|(slot, _)| answer.held(place(slot))).collect();
        let some = |units: &&Units| !units.is_empty();
        let units = |axis: Axis| {
            let after = group.partitions.get(&axis);
            let slots = held.iter().enumerate().map(move |(slot, held)| {
                let before = held.and_then(|holding| holding.units.get(&axis));
                let after = after.and_then(|sets| sets.get(slot));
                (before.filter(some), after.filter(some))
            });
            slots.collect()
        };
        let axes = ascending(answer.job, group.stage).into_iter().map(|axis| (axis, units(axis)));
        Self { group, fates: fates.collect(), axes: axes.collect() }
    }

    fn is_one(&self) -> bool {
        let stays = self.fates.iter().all(|fate| matches!(fate, Fate::Stays | Fate::Idle));
        let same = self.axes.iter().flat_map(|(_, slots)| slots).all(|(before, after)| before == after);
        !(stays && same)
    }

    fn lines(&self, answer: &Answer<'_>) -> Vec<String> {
        let group = self.group;
        let place = |slot| group.place(Slot(slot));
        let before = match answer.degree_before(group) {
            0 => "held nothing".to_owned(),
            degree => format!("TP{degree}"),
        };
        let after = match group.degree() {
            0 => "does not train".to_owned(),
            degree => format!("TP{degree}"),
        };
        let picture: String = self.fates.iter().map(|fate| fate.picture()).collect();
        let name = format!("replica {} stage {}", group.replica, group.stage);
        let mut lines = vec![format!("{name}: {before} -> {after}  {picture}")];
        // One column a family, of the first layers that are split alike.
        let all = runs(self.axes.iter().map(|(axis, slots)| (*axis, slots)));
        let families = [Family::Attn, Family::Ffn, Family::Vocab];
        let of = |family| all.iter().filter(move |run| run.family == family);
        let columns: Vec<&Run<_>> = families.into_iter().filter_map(|family| of(family).next()).collect();
        let title = |run: &Run<_>| {
            let family = run.family.to_string().to_uppercase();
            match run.layers {
                None => family,
                Some((start, end)) if end == start + 1 => format!("{family} {start}"),
                Some((start, end)) => format!("{family} {start}-{}", end - 1),
            }
        };
        let header = ["SLOT", "GPU", "STATE"].map(str::to_owned).into_iter();
        let mut table = Table::new(header.chain(columns.iter().map(|run| title(run))));
        for (slot, fate) in self.fates.iter().enumerate().take(MOST_SLOTS) {
            let gpu =
                answer.seating.seats.get(place(slot as u32)).map_or("-".to_owned(), ToString::to_string);
            let cells = [slot.to_string(), gpu, fate.word().to_owned()].into_iter();
            let units = columns.iter().map(|run| cell(run.value[slot]));
            table.row(cells.chain(units).collect::<Vec<_>>());
        }
        lines.extend(table.lines().into_iter().map(|line| format!("  {line}")));
        if self.fates.len() > MOST_SLOTS {
            lines.push(format!("  and {}", count(self.fates.len() - MOST_SLOTS, "more slot")));
        }
        let others = all.len() - columns.len();
        if others > 0 {
            lines.push("  other layers are split in other ways; --format json has all".into());
        }
        lines
    }
}

fn cell((before, after): (Owned<'_>, Owned<'_>)) -> String {
    if before == after { text(after) } else { format!("{} -> {}", text(before), text(after)) }
}

/// As ranges; of many the first and how many units there are.
fn text(units: Owned<'_>) -> String {
    const MOST: usize = 6;
    let Some(units) = units else { return "-".to_owned() };
    let intervals = units.intervals();
    match intervals.len() {
        0..=MOST => units.to_string(),
        _ => {
            let first: Units = intervals[..MOST].iter().copied().collect();
            format!("{first},... ({} units)", units.len())
        }
    }
}
