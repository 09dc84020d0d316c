//! Matrix products, which the `matrixmultiply` crate makes.
//!
//! Each element's sum runs over `k` in order, in the library's parts of 256 terms. Nothing else has a say: not where the
//! element lies, how the work is cut up, or how many threads there are. The tests hold the library to it.
#![allow(unsafe_code)]

use crate::Real;
use crate::cpu::kernels::{round, softmax_gradient};
use crate::cpu::view::{View, ViewMut};
use crate::team::Team;

/// The parts for threads are multiples of this: the rows that the library packs at once.
const PART: usize = 64;
/// Rows of a band that are one product. What is zero or not wanted is left out up to this grain.
const STEP: usize = 64;
/// Values that are rounded to bf16 at once.
const ROUNDED: usize = 1 << 20;

/// `c = alpha * a * b + beta * c` with sizes `m, k, n`; each matrix with the distances of its rows and of its columns.
/// With `beta` zero what is in `c` is not read.
pub(crate) type Gemm<T> = unsafe fn(
    usize,
    usize,
    usize,
    T,
    *const T,
    isize,
    isize,
    *const T,
    isize,
    isize,
    T,
    *mut T,
    isize,
    isize,
);

/// What becomes of the sums.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Store<'a, T> {
    /// They replace what is there, which is not read.
    Replace,
    /// They are added to what is there.
    Add,
    /// `c * (sum - shift[row]) * factor`: the softmax's gradient, with the probabilities in `c`.
    Softmax { shift: &'a [T], factor: T },
}

/// What is known to be zero or not wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Band {
    Full,
    /// Of the result only what is on or below the diagonal is wanted; the rest may be anything, or as it was.
    LowerResult,
    /// Of the left matrix everything above the diagonal is zero.
    LowerLeft,
    /// Of the left matrix everything below the diagonal is zero.
    UpperLeft,
}

/// `c = a * b` or `c += a * b` on all threads of the team.
///
/// # Panics
/// If the shapes do not match.
pub(crate) fn product<T: Real>(
    team: &Team,
    a: View<'_, T>,
    b: View<'_, T>,
    into: Store<'_, T>,
    c: ViewMut<'_, T>,
) {
    assert_match(&a, &b, &c);
    let (m, k, n) = (c.rows, a.cols, c.cols);
    if m == 0 || k == 0 || n == 0 {
        return banded(T::ONE, a, b, into, c, Band::Full);
    }
    if b.rounded {
        let cols = (ROUNDED / k).next_multiple_of(PART).max(PART);
        let pieces = (0..n).step_by(cols).zip(c.pieces(m, cols));
        return T::with_buffer(|buffer| {
            for (col, c) in pieces {
                product(team, a, rounded(team, b.piece(0, k, col, c.cols), buffer), into, c);
            }
        });
    }
    if team.threads() == 1 {
        return banded(T::ONE, a, b, into, c, Band::Full);
    }
    assert!(!matches!(into, Store::Softmax { .. }), "not in parts");
    // The longer side is cut, in two parts a thread: who is late takes only one.
    let part = |side: usize| side.div_ceil(2 * team.threads()).next_multiple_of(PART);
    let (rows, cols) = if m >= n { (part(m), n) } else { (m, part(n)) };
    let starts = (0..m).step_by(rows).flat_map(|row| (0..n).step_by(cols).map(move |col| (row, col)));
    team.each(starts.zip(c.pieces(rows, cols)), |((row, col), c)| {
        let a = a.piece(row, c.rows, 0, a.cols);
        let b = b.piece(0, b.rows, col, c.cols);
        banded(T::ONE, a, b, into, c, Band::Full);
    });
}

/// A copy of the matrix, rounded to bf16.
fn rounded<'a, T: Real>(team: &Team, of: View<'_, T>, copy: &'a mut Vec<T>) -> View<'a, T> {
    let turned = of.col_stride != 1;
    let stored = if turned { of.t() } else { of };
    let (rows, cols) = (stored.rows, stored.cols);
    copy.resize(rows * cols, T::ZERO);
    team.each(copy.chunks_mut(PART * cols).enumerate(), |(chunk, copy)| {
        for (row, copy) in copy.chunks_exact_mut(cols).enumerate() {
            round(stored.row(chunk * PART + row), copy);
        }
    });
    let copy = View::new(copy, rows, cols);
    if turned { copy.t() } else { copy }
}

/// `alpha * a * b` into `c`, on this thread.
///
/// # Panics
/// If the shapes do not match.
pub(crate) fn banded<T: Real>(
    alpha: T,
    a: View<'_, T>,
    b: View<'_, T>,
    into: Store<'_, T>,
    c: ViewMut<'_, T>,
    band: Band,
) {
    assert_match(&a, &b, &c);
    let (m, k, n) = (c.rows, a.cols, c.cols);
    let beta = match into {
        Store::Replace | Store::Softmax { .. } => T::ZERO,
        Store::Add => T::ONE,
    };
    if band == Band::Full && !matches!(into, Store::Softmax { .. }) {
        return multiply(alpha, a, b, beta, c);
    }
    for (row, c) in (0..m).step_by(STEP).zip(c.pieces(STEP, n.max(1))) {
        let end = row + c.rows;
        let (terms, cols) = match band {
            Band::Full => (0..k, n),
            Band::LowerResult => (0..k, end.min(n)),
            Band::LowerLeft => (0..end.min(k), n),
            Band::UpperLeft => (row.min(k)..k, n),
        };
        let a = a.piece(row, c.rows, terms.start, terms.len());
        let b = b.piece(terms.start, terms.len(), 0, cols);
        let (mut c, _) = c.split_cols(cols);
        let Store::Softmax { shift, factor } = into else {
            multiply(alpha, a, b, beta, c);
            continue;
        };
        T::with_buffer(|sums| {
            sums.resize(c.rows * cols, T::ZERO);
            multiply(alpha, a, b, beta, ViewMut::new(sums, c.rows, cols));
            for (i, sums) in sums.chunks_exact(cols).enumerate() {
                softmax_gradient(c.row(i), sums, shift[row + i], factor);
            }
        });
    }
}

/// The call into the library: `c = alpha * a * b + beta * c`.
fn multiply<T: Real>(alpha: T, a: View<'_, T>, b: View<'_, T>, beta: T, c: ViewMut<'_, T>) {
    assert_match(&a, &b, &c);
    let [a_rows, a_cols, b_rows, b_cols, c_rows] =
        [a.row_stride, a.col_stride, b.row_stride, b.col_stride, c.stride].map(|stride| stride as isize);
    let (k, out) = (a.cols, c.data);
    // SAFETY: the library reads and writes the elements of matrices of these sizes at these distances. They are the views'
    // own: each of their elements lies in the slice that the view borrows, at an offset that fits an `isize`. `c` is an
    // exclusive borrow, so nothing else refers to its elements, and its rows do not overlap.
    // The transposed call below is of the same matrices.
    let call = |m, n, (a, a_rows, a_cols), (b, b_rows, b_cols), (c_rows, c_cols)| unsafe {
        (T::GEMM)(m, k, n, alpha, a, a_rows, a_cols, b, b_rows, b_cols, beta, out, c_rows, c_cols);
    };
    // The library packs the left matrix once for every 1024 columns of the right one: the longer side goes left, if need be as
    // the transposed product, whose sums have the same bits.
    if c.rows >= c.cols {
        call(c.rows, c.cols, (a.data, a_rows, a_cols), (b.data, b_rows, b_cols), (c_rows, 1));
    } else {
        call(c.cols, c.rows, (b.data, b_cols, b_rows), (a.data, a_cols, a_rows), (1, c_rows));
    }
}

fn assert_match<T>(a: &View<'_, T>, b: &View<'_, T>, c: &ViewMut<'_, T>) {
    assert!(
        a.rows == c.rows && b.cols == c.cols && a.cols == b.rows,
        "({} x {}) * ({} x {}) into ({} x {})",
        a.rows,
        a.cols,
        b.rows,
        b.cols,
        c.rows,
        c.cols
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize, seed: usize) -> Vec<f64> {
        (0..count).map(|i| ((i * 37 + seed * 101) as f64 * 0.618).sin()).collect()
    }

    /// Sizes at, below and above those of blocks, panels and parts.
    const SIZES: [(usize, usize, usize); 8] = [
        (5, 3, 7),
        (12, 16, 16),
        (13, 1, 17),
        (64, 300, 33),
        (150, 256, 70),
        (6, 520, 1030),
        (289, 40, 100),
        (100, 40, 289),
    ];

    #[test]
    fn products_match_the_definition() {
        for (m, k, n) in SIZES {
            let (a, b) = (numbers(m * k, 1), numbers(n * k, 2));
            let element = |i: usize, j: usize| -> f64 { (0..k).map(|l| a[i * k + l] * b[j * k + l]).sum() };
            // The same matrices stored the other way round.
            let turned = |x: &[f64], rows: usize| -> Vec<f64> {
                (0..k * rows).map(|at| x[at % rows * k + at / rows]).collect()
            };
            let (a_turned, b_turned) = (turned(&a, m), turned(&b, n));
            for a in [View::new(&a, m, k), View::new(&a_turned, k, m).t()] {
                for b in [View::new(&b, n, k).t(), View::new(&b_turned, k, n)] {
                    for (alpha, into) in [(2.0, Store::Replace), (0.5, Store::Add)] {
                        let before = numbers(m * (n + 2), 3);
                        let mut c = before.clone();
                        banded(
                            alpha,
                            a,
                            b,
                            into,
                            ViewMut::strided(&mut c[..m * (n + 2) - 2], m, n, n + 2),
                            Band::Full,
                        );
                        for i in 0..m {
                            for j in 0..n {
                                let at = i * (n + 2) + j;
                                let old = if matches!(into, Store::Add) { before[at] } else { 0.0 };
                                let expected = alpha * element(i, j) + old;
                                assert!((c[at] - expected).abs() < 1e-11, "{m} {k} {n}: {i} {j}");
                            }
                            let gap = i * (n + 2) + n..(i + 1) * (n + 2);
                            assert_eq!(c[gap.clone()], before[gap]);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn bits_depend_neither_on_threads_nor_on_the_place_of_an_element() {
        for (m, k, n) in SIZES {
            let [a, b] = [numbers(m * k, 1), numbers(n * k, 2)]
                .map(|x| x.into_iter().map(|x| x as f32).collect::<Vec<_>>());
            let with = |threads: usize| {
                let mut c = vec![1.0_f32; m * n];
                let (a, b) = (View::new(&a, m, k), View::new(&b, n, k).t());
                product(&Team::new(threads).expect("threads"), a, b, Store::Add, ViewMut::new(&mut c, m, n));
                c
            };
            let alone = with(1);
            for threads in [2, 3, 7] {
                assert!(with(threads) == alone, "{m} {k} {n} on {threads} threads");
            }
            let mut element = [1.0_f32];
            let (i, j) = (m / 2, n - 1);
            let (a, b) = (View::new(&a, m, k).piece(i, 1, 0, k), View::new(&b, n, k).piece(j, 1, 0, k).t());
            banded(1.0, a, b, Store::Add, ViewMut::new(&mut element, 1, 1), Band::Full);
            assert_eq!(element[0].to_bits(), alone[i * n + j].to_bits());
        }
    }

    /// What a band leaves out does not matter when it is what the band says.
    #[test]
    fn bands_are_what_is_left_of_the_whole() {
        for (side, inner) in [(1, 4), (16, 8), (50, 32), (300, 20)] {
            let square = numbers(side * side, 1);
            let lower: Vec<f64> =
                (0..side * side).map(|at| if at % side <= at / side { square[at] } else { 0.0 }).collect();
            let wide = numbers(side * inner, 2);
            let (lower, wide) = (View::new(&lower, side, side), View::new(&wide, side, inner));
            for (left, band) in [(lower, Band::LowerLeft), (lower.t(), Band::UpperLeft)] {
                let [got, expected] = [band, Band::Full].map(|band| {
                    let mut c = vec![f64::NAN; side * inner];
                    banded(1.0, left, wide, Store::Replace, ViewMut::new(&mut c, side, inner), band);
                    c
                });
                let near = got.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-12);
                assert!(near, "{side} {band:?}");
            }
            let [got, expected] = [Band::LowerResult, Band::Full].map(|band| {
                let mut c = vec![0.0; side * side];
                banded(3.0, wide, wide.t(), Store::Replace, ViewMut::new(&mut c, side, side), band);
                c
            });
            for at in (0..side * side).filter(|at| at % side <= at / side) {
                assert_eq!(got[at].to_bits(), expected[at].to_bits());
            }
            assert!(side <= STEP || got[side - 1] == 0.0, "the far corner is left out");
        }
    }

    #[test]
    fn the_softmax_gradient_is_made_in_place() {
        let (m, k, n) = (20, 300, 20);
        let (a, b, before, shift) = (numbers(m * k, 1), numbers(n * k, 2), numbers(m * n, 3), numbers(m, 4));
        let mut c = before.clone();
        let into = Store::Softmax { shift: &shift, factor: 0.25 };
        banded(
            1.0,
            View::new(&a, m, k),
            View::new(&b, n, k).t(),
            into,
            ViewMut::new(&mut c, m, n),
            Band::Full,
        );
        for at in 0..m * n {
            let (i, j) = (at / n, at % n);
            let sum: f64 = (0..k).map(|l| a[i * k + l] * b[j * k + l]).sum();
            assert!((c[at] - before[at] * (sum - shift[i]) * 0.25).abs() < 1e-11);
        }
    }

    #[test]
    fn an_empty_sum_is_zero() {
        let mut c = vec![f32::NAN; 4];
        let (a, b) = (View::new(&[], 2, 0), View::new(&[], 0, 2));
        banded(1.0, a, b, Store::Replace, ViewMut::new(&mut c, 2, 2), Band::Full);
        assert_eq!(c, [0.0; 4]);
        let (a, b) = (View::new(&[], 0, 3), View::new(&[0.0_f32; 6], 3, 2));
        banded(1.0, a, b, Store::Replace, ViewMut::new(&mut [], 0, 2), Band::Full);
    }
}
