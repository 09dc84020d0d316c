//! Whether an operation makes sense for its buffer and group. Errors are texts for who submitted it.

use crate::buffer::Kind;
use std::ops::Range;

pub(super) fn numeric(kind: Kind) -> Result<Kind, String> {
    match kind {
        Kind::F32 | Kind::F64 => Ok(kind),
        Kind::Bytes => Err("bytes cannot be reduced; use F32 or F64".into()),
    }
}

pub(super) fn in_group(rank: usize, size: usize) -> Result<(), String> {
    if rank >= size {
        return Err(format!("rank {rank} is not in a group of {size}"));
    }
    Ok(())
}

/// The parts of all ranks together are the buffer.
pub(super) fn check_counts(counts: &[usize], size: usize, len: usize) -> Result<(), String> {
    one_for_each("counts", counts.len(), size)?;
    match counts.iter().try_fold(0_usize, |total, &count| total.checked_add(count)) {
        Some(total) if total == len => Ok(()),
        Some(total) => Err(format!("counts add up to {total} but the buffer has {len} elements")),
        None => Err("counts add up to more than fits in memory".into()),
    }
}

/// What comes in destroys neither what goes out nor what else comes in.
pub(super) fn check_places(
    send: &[Range<usize>],
    receive: &[Range<usize>],
    rank: usize,
    size: usize,
    len: usize,
) -> Result<(), String> {
    for (name, ranges) in [("send", send), ("receive", receive)] {
        one_for_each(name, ranges.len(), size)?;
        if let Some(peer) = ranges.iter().position(|range| range.start > range.end || range.end > len) {
            return Err(format!("{name}[{peer}] is {:?} in a buffer of {len} elements", ranges[peer]));
        }
    }
    let (from, to) = (&send[rank], &receive[rank]);
    if from.len() != to.len() {
        return Err(format!("this rank sends itself {} elements but receives {}", from.len(), to.len()));
    }
    let mut places: Vec<(usize, &Range<usize>)> =
        receive.iter().enumerate().filter(|(_, range)| !range.is_empty()).collect();
    places.sort_unstable_by_key(|(_, range)| range.start);
    let mut neighbours = places.iter().zip(places.iter().skip(1));
    if let Some(((one, first), (other, second))) =
        neighbours.find(|((_, first), (_, second))| first.end > second.start)
    {
        return Err(format!("receive[{one}], {first:?}, and receive[{other}], {second:?}, overlap"));
    }
    for (peer, range) in send.iter().enumerate().filter(|(_, range)| !range.is_empty()) {
        // What it sends itself may stay where it is.
        let next = places.partition_point(|(_, place)| place.end <= range.start);
        if let Some((from, place)) = places.get(next)
            && place.start < range.end
            && !(peer == rank && *from == rank && range == *place)
        {
            return Err(format!("send[{peer}], {range:?}, and receive[{from}], {place:?}, overlap"));
        }
    }
    Ok(())
}

fn one_for_each(name: &str, entries: usize, size: usize) -> Result<(), String> {
    if entries != size {
        return Err(format!("{name} has {entries} entries for a group of {size}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_in_overlaps_nothing() {
        // Of three ranks, the second.
        let check =
            |send: [Range<usize>; 3], receive: [Range<usize>; 3]| check_places(&send, &receive, 1, 3, 12);
        for (send, receive) in [
            ([0..2, 2..4, 4..6], [6..8, 8..10, 10..12]),
            ([8..10, 6..8, 10..12], [2..4, 0..2, 4..6]),
            // The same data to two ranks; nothing for this one; nothing amid something.
            ([0..6, 3..3, 0..6], [6..9, 7..7, 9..12]),
            // Its own part stays in place.
            ([0..4, 4..8, 0..2], [8..10, 4..8, 10..12]),
        ] {
            assert_eq!(check(send.clone(), receive.clone()), Ok(()), "{send:?} {receive:?}");
        }
        for (send, receive, complaint) in [
            ([0..2, 2..4, 4..6], [6..9, 8..10, 10..12], "receive[0], 6..9, and receive[1], 8..10, overlap"),
            ([0..2, 2..4, 4..7], [7..8, 8..10, 6..7], "send[2], 4..7, and receive[2], 6..7, overlap"),
            ([0..2, 2..4, 4..6], [0..2, 8..10, 10..12], "send[0], 0..2, and receive[0], 0..2, overlap"),
            ([0..2, 2..4, 4..6], [6..8, 3..5, 10..12], "send[1], 2..4, and receive[1], 3..5, overlap"),
            ([0..4, 4..8, 6..8], [8..10, 4..8, 10..12], "send[2], 6..8, and receive[1], 4..8, overlap"),
            ([0..2, 2..4, 4..6], [6..8, 8..9, 10..12], "sends itself 2 elements but receives 1"),
            ([0..2, 2..4, 4..13], [6..8, 8..10, 10..12], "send[2] is 4..13 in a buffer of 12"),
        ] {
            let error = check(send, receive).unwrap_err();
            assert!(error.contains(complaint), "{error}");
        }
        let error = check_places(&[0..1, 0..1, 0..1], &[0..1, 1..2], 0, 2, 2).unwrap_err();
        assert!(error.contains("send has 3 entries for a group of 2"), "{error}");
    }
}
