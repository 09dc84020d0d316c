//! Who sends what to whom.

use super::{MOST_PAIRS, count};
use crate::output::bytes_text;
use crate::plan::answer::Answer;
use crate::table::Table;
use reknit_layout::{Family, Place, Transfer, WorkerKey};
use std::collections::BTreeMap;

pub(super) fn lines(answer: &Answer<'_>) -> Vec<String> {
    let plan = &answer.plan;
    if plan.transfers.is_empty() {
        return Vec::new();
    }
    let mut pairs: BTreeMap<(Option<Place>, &WorkerKey, Option<Place>), Pair> = BTreeMap::new();
    for transfer in &plan.transfers {
        let key = (answer.place_of(&transfer.from), &transfer.from, answer.place_of(&transfer.to));
        pairs.entry(key).or_insert_with(|| Pair::new(answer, transfer)).add(transfer);
    }
    let mut table = Table::new(["FROM", "TO", "UNITS", "BYTES"]);
    for pair in pairs.values().take(MOST_PAIRS) {
        table.row([pair.from.clone(), pair.to.clone(), pair.units(), bytes_text(pair.bytes)]);
    }
    let mut lines = table.lines();
    if pairs.len() > MOST_PAIRS {
        let rest: u64 = pairs.values().skip(MOST_PAIRS).map(|pair| pair.bytes).sum();
        let more = count(pairs.len() - MOST_PAIRS, "more pair");
        lines.push(format!("and {more} with {}; --format json has all", bytes_text(rest)));
    }
    lines.push(total(answer));
    lines
}

/// All that one GPU sends to another.
struct Pair {
    from: String,
    to: String,
    /// Units over all layers.
    families: BTreeMap<Family, u64>,
    replicated: bool,
    bytes: u64,
}

impl Pair {
    fn new(answer: &Answer<'_>, transfer: &Transfer) -> Self {
        let (from, to) = (answer.name_of(&transfer.from), answer.name_of(&transfer.to));
        Self { from, to, families: BTreeMap::new(), replicated: false, bytes: 0 }
    }

    fn add(&mut self, transfer: &Transfer) {
        match transfer.axis {
            Some(axis) => *self.families.entry(axis.family).or_default() += u64::from(transfer.units.len()),
            None => self.replicated = true,
        }
        self.bytes += transfer.bytes;
    }

    /// `attn 4, ffn 16, norms`
    fn units(&self) -> String {
        let families = self.families.iter().map(|(family, units)| format!("{family} {units}"));
        families.chain(self.replicated.then(|| "norms".to_owned())).collect::<Vec<_>>().join(", ")
    }
}

fn total(answer: &Answer<'_>) -> String {
    let plan = &answer.plan;
    let (sent, received) = answer.busiest();
    let busiest = format!("at most {} from one GPU and {} to one", bytes_text(sent), bytes_text(received));
    let mut text = format!("{} in all, {busiest}", bytes_text(plan.bytes_moved));
    let more = plan.bytes_moved.saturating_sub(plan.bytes_lower_bound);
    if more > 0 {
        text += &format!(
            "; {} more than the least possible, {}: groups that are whole again own their nominal units",
            bytes_text(more),
            bytes_text(plan.bytes_lower_bound)
        );
    } else {
        text += "; no balanced layout moves less";
    }
    if plan.bytes_to_balance > 0 {
        let bytes = bytes_text(plan.bytes_to_balance);
        let why = "slots of a group differ by at most one unit, those of a whole one own their nominal units";
        text += &format!("; {bytes} of it only for balance: {why}");
    }
    text
}
