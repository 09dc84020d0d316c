//! A plan as text for people: what happens, who owns what, who sends what to whom, what it costs, what comes next.
//!
//! It stays readable for any job: only groups that change are shown, and long lists say how much they leave out.

mod groups;
mod headline;
mod moves;
mod outlook;

pub(crate) use headline::unrecoverable;

use super::answer::Answer;

/// Groups whose slots are shown.
const MOST_GROUPS: usize = 6;
/// Slots of one group.
const MOST_SLOTS: usize = 32;
/// Pairs of a sender and a receiver.
const MOST_PAIRS: usize = 16;
/// Names of places or nodes, replicas and the like in one sentence.
const MOST_NAMES: usize = 4;

pub(crate) fn lines(answer: &Answer<'_>) -> Vec<String> {
    if !answer.missing.is_empty() {
        return headline::lost(answer);
    }
    let ahead = [answer.ahead(1), answer.ahead(2)];
    let mut lines = vec![headline::sentence(answer, &ahead[0])];
    for part in [groups::lines(answer), moves::lines(answer), outlook::lines(answer, &ahead)] {
        if !part.is_empty() {
            lines.push(String::new());
            lines.extend(part);
        }
    }
    lines
}

/// `1 GPU`, `2 GPUs`
fn count(number: usize, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}

/// `a, b and 3 more`
fn names(all: impl IntoIterator<Item = String>) -> String {
    let all: Vec<String> = all.into_iter().collect();
    match all.len() {
        0..=MOST_NAMES => all.join(", "),
        many => format!("{} and {} more", all[..MOST_NAMES].join(", "), many - MOST_NAMES),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_say_what_they_leave_out() {
        let all = |n: u32| names((0..n).map(|i| i.to_string()));
        assert_eq!(all(4), "0, 1, 2, 3");
        assert_eq!(all(100), "0, 1, 2, 3 and 96 more");
    }
}
