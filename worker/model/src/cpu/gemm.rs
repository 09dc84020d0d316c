//! Matrix products: both matrices are packed into panels, and a block of the result as large as the registers is summed at
//! once (the scheme of Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", 2008).
//!
//! Each element's sum runs over `k` in order, in parts of [`KC`] terms, with fused multiply-adds wherever the machine has
//! them. Nothing else has a say: not where the element lies, how the work is cut up, or how many threads there are.
#![allow(unsafe_code)]

use crate::Real;
use crate::cpu::isa::Isa;
use crate::cpu::lanes::{LANES, Lanes, Plain};
use crate::cpu::view::{View, ViewMut};
use crate::team::Team;

/// Columns of the block in registers.
const NR: usize = LANES;
/// Terms of a sum that are added up before the result is touched.
const KC: usize = 512;
/// Rows packed at once: with [`KC`] terms they stay in the second-level cache. A multiple of every block's rows.
const MC: usize = 144;
/// Columns packed at once.
const NC: usize = 1024;
/// Up to this many columns the rows are not packed: they are read too few times.
const FEW: usize = 4 * NR;
/// The parts for threads are multiples of this, so that hardly any block is cut.
const PART: usize = 48;

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

/// Buffers for packed panels, one for each thread.
#[derive(Debug, Default)]
pub struct Packs<T> {
    left: Vec<T>,
    right: Vec<T>,
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
    let (m, n) = (c.rows, c.cols);
    if team.threads() == 1 || m == 0 || n == 0 {
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
    on(Isa::best(), Work { alpha, a, b, into, band }, c);
}

/// `isa` must be one that the machine has.
fn on<T: Real>(isa: Isa, of: Work<'_, T>, c: ViewMut<'_, T>) {
    T::with_packs(|packs| match isa {
        // SAFETY: `Isa::best` found what the version needs.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { avx512(of, c, packs) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { avx2(of, c, packs) },
        // Every 64-bit ARM has fused multiply-adds.
        Isa::Plain if cfg!(target_arch = "aarch64") => blocks::<T, Plain<T, true>, 6>(of, c, packs),
        Isa::Plain => blocks::<T, Plain<T, false>, 6>(of, c, packs),
    });
}

struct Work<'a, T> {
    alpha: T,
    a: View<'a, T>,
    b: View<'a, T>,
    into: Store<'a, T>,
    band: Band,
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
fn avx512<T: Real>(of: Work<'_, T>, c: ViewMut<'_, T>, packs: &mut Packs<T>) {
    blocks::<T, T::Avx512, 12>(of, c, packs);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2<T: Real>(of: Work<'_, T>, c: ViewMut<'_, T>, packs: &mut Packs<T>) {
    blocks::<T, T::Avx2, 6>(of, c, packs);
}

/// The whole product, in blocks of `MR` x [`NR`].
#[inline(always)]
fn blocks<T: Real, L: Lanes<T>, const MR: usize>(of: Work<'_, T>, c: ViewMut<'_, T>, packs: &mut Packs<T>) {
    let Work { alpha, a, b, into, band } = of;
    let (m, n, k) = (c.rows, c.cols, a.cols);
    // What is done to the sum must see all of it.
    let most = if matches!(into, Store::Softmax { .. }) { k.max(1) } else { KC };
    let pack_left = n > FEW;
    for col in (0..n).step_by(NC) {
        let cols = NC.min(n - col);
        let mut term = 0;
        loop {
            let terms = most.min(k - term);
            pack_right(b.piece(term, terms, col, cols), &mut packs.right);
            for row in (0..m).step_by(MC) {
                let rows = MC.min(m - row);
                if pack_left {
                    pack_left_rows::<T, MR>(a.piece(row, rows, term, terms), &mut packs.left);
                }
                for (panel, of_panel) in (0..cols).step_by(NR).enumerate() {
                    let right = &packs.right[panel * terms * NR..][..terms * NR];
                    for (number, of_block) in (0..rows).step_by(MR).enumerate() {
                        let (i, j) = (row + of_block, col + of_panel);
                        let (height, width) = (MR.min(m - i), NR.min(n - j));
                        let last = i + height - 1;
                        let wanted = match band {
                            Band::Full => Some((0, terms)),
                            Band::LowerResult => (j <= last).then_some((0, terms)),
                            Band::LowerLeft => Some((0, (last + 1).saturating_sub(term).min(terms))),
                            Band::UpperLeft => Some((i.saturating_sub(term).min(terms), terms)),
                        };
                        let Some((from, to)) = wanted else { continue };
                        let right = &right[from * NR..to * NR];
                        // The result's rows are far apart: they are fetched while the sums are made.
                        for row in i..i + height {
                            L::prefetch(c.data.wrapping_add(row * c.stride + j));
                        }
                        let sums = if pack_left {
                            let left = &packs.left[number * terms * MR..][..terms * MR];
                            packed::<T, L, MR>(&left[from * MR..to * MR], right)
                        } else {
                            let left = a.piece(i, height, term + from, to - from);
                            in_place::<T, L, MR>(left, right)
                        };
                        let into =
                            if term == 0 || !matches!(into, Store::Replace) { into } else { Store::Add };
                        // SAFETY: the block lies inside `c`.
                        unsafe {
                            let at = c.data.add(i * c.stride + j);
                            store(sums, alpha, into, i, at, c.stride, (height, width));
                        }
                    }
                }
            }
            term += terms;
            if term == k {
                break;
            }
        }
    }
}

/// Makes the buffer at least `len` long, and `usual` at once: what is not used takes no memory, and it need not grow again.
#[inline(always)]
fn provide<T: Real>(buffer: &mut Vec<T>, len: usize, usual: usize) {
    if buffer.len() < len {
        *buffer = vec![T::ZERO; len.max(usual)];
    }
}

/// Panels of [`NR`] columns; in each the rows follow each other, filled up with zeros.
#[inline(always)]
fn pack_right<T: Real>(b: View<'_, T>, out: &mut Vec<T>) {
    let panels = b.cols.div_ceil(NR);
    provide(out, panels * b.rows * NR, KC * NC);
    if b.rows == 0 {
        return;
    }
    for (panel, out) in out.chunks_exact_mut(b.rows * NR).take(panels).enumerate() {
        pack::<T, NR>(b.t().piece(panel * NR, NR.min(b.cols - panel * NR), 0, b.rows), out);
        if b.rounded {
            out.iter_mut().for_each(|x| *x = x.to_bf16());
        }
    }
}

/// Panels of `MR` rows; in each the columns follow each other, filled up with zeros.
#[inline(always)]
fn pack_left_rows<T: Real, const MR: usize>(a: View<'_, T>, out: &mut Vec<T>) {
    let panels = a.rows.div_ceil(MR);
    provide(out, panels * a.cols * MR, MC * KC);
    if a.cols == 0 {
        return;
    }
    for (panel, out) in out.chunks_exact_mut(a.cols * MR).take(panels).enumerate() {
        pack::<T, MR>(a.piece(panel * MR, MR.min(a.rows - panel * MR), 0, a.cols), out);
    }
}

/// One panel of at most `R` rows: column after column.
#[inline(always)]
fn pack<T: Real, const R: usize>(rows: View<'_, T>, out: &mut [T]) {
    let columns = out.chunks_exact_mut(R).enumerate();
    // SAFETY (all reads): the element lies inside the view.
    if rows.rows < R {
        for (col, out) in columns {
            for (row, out) in out.iter_mut().enumerate() {
                let inside = row < rows.rows;
                let at = row * rows.row_stride + col * rows.col_stride;
                *out = if inside { unsafe { *rows.data.add(at) } } else { T::ZERO };
            }
        }
    } else if rows.row_stride == 1 {
        for (col, out) in columns {
            let column = unsafe { std::slice::from_raw_parts(rows.data.add(col * rows.col_stride), R) };
            out.copy_from_slice(column);
        }
    } else {
        for (col, out) in columns {
            for (row, out) in out.iter_mut().enumerate() {
                *out = unsafe { *rows.data.add(row * rows.row_stride + col * rows.col_stride) };
            }
        }
    }
}

#[inline(always)]
fn packed<T: Real, L: Lanes<T>, const MR: usize>(left: &[T], right: &[T]) -> [L; MR] {
    let mut sums = [L::all(T::ZERO); MR];
    let (left, _) = left.as_chunks::<MR>();
    let (right, _) = right.as_chunks::<NR>();
    for (left, right) in left.iter().zip(right) {
        let right = L::load(right);
        for row in 0..MR {
            sums[row] = sums[row].add_product(left[row], right);
        }
    }
    sums
}

/// The same with rows that are not packed.
#[inline(always)]
fn in_place<T: Real, L: Lanes<T>, const MR: usize>(left: View<'_, T>, right: &[T]) -> [L; MR] {
    let mut sums = [L::all(T::ZERO); MR];
    let (right, _) = right.as_chunks::<NR>();
    if right.is_empty() {
        return sums;
    }
    assert!(right.len() == left.cols && left.rows >= 1);
    // Rows beyond the last are the last once more; what they sum up is not stored.
    let mut starts = [0; MR];
    for (row, start) in starts.iter_mut().enumerate() {
        *start = row.min(left.rows - 1) * left.row_stride;
    }
    for (col, right) in right.iter().enumerate() {
        let right = L::load(right);
        for row in 0..MR {
            // SAFETY: the element lies inside the view.
            let x = unsafe { *left.data.add(starts[row] + col * left.col_stride) };
            sums[row] = sums[row].add_product(x, right);
        }
    }
    sums
}

/// # Safety
/// `height` rows of `width` elements, `stride` apart, must be there for writing at `at`.
#[inline(always)]
unsafe fn store<T: Real, L: Lanes<T>, const MR: usize>(
    sums: [L; MR],
    alpha: T,
    into: Store<'_, T>,
    row: usize,
    at: *mut T,
    stride: usize,
    (height, width): (usize, usize),
) {
    let alpha = L::all(alpha);
    for (i, sums) in sums.into_iter().enumerate().take(height) {
        // SAFETY: as this function demands.
        let out = unsafe { std::slice::from_raw_parts_mut(at.add(i * stride), width) };
        let factors = match into {
            Store::Replace | Store::Add => [T::ZERO; 2],
            Store::Softmax { shift, factor } => [shift[row + i], factor],
        };
        if let Ok(out) = <&mut [T; NR]>::try_from(&mut *out) {
            finish(alpha.multiply(sums), into, factors, out);
        } else {
            let mut whole = [T::ZERO; NR];
            whole[..width].copy_from_slice(out);
            finish(alpha.multiply(sums), into, factors, &mut whole);
            out.copy_from_slice(&whole[..width]);
        }
    }
}

#[inline(always)]
fn finish<T: Real, L: Lanes<T>>(sums: L, into: Store<'_, T>, [shift, factor]: [T; 2], out: &mut [T; NR]) {
    match into {
        Store::Replace => sums.store(out),
        Store::Add => L::load(out).add(sums).store(out),
        Store::Softmax { .. } => {
            L::load(out).multiply(sums.subtract(L::all(shift))).multiply(L::all(factor)).store(out);
        }
    }
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

    #[test]
    fn every_instruction_set_computes_the_same() {
        for (m, k, n) in SIZES {
            let (left, right) = (numbers(m * k, 1), numbers(n * k, 2));
            let [of_a, of_b] = [&left, &right].map(|x| x.iter().map(|&x| x as f32).collect::<Vec<_>>());
            let with = |isa: Isa| {
                let (mut single, mut double) = (vec![1.0_f32; m * n], vec![1.0_f64; m * n]);
                let (a, b) = (View::new(&of_a, m, k), View::new(&of_b, n, k).t());
                let (alpha, into, band) = (0.5, Store::Add, Band::Full);
                on(isa, Work { alpha, a, b, into, band }, ViewMut::new(&mut single, m, n));
                let (a, b) = (View::new(&left, m, k), View::new(&right, n, k).t());
                let of = Work { alpha: 0.5, a, b, into: Store::Add, band };
                on(isa, of, ViewMut::new(&mut double, m, n));
                (single, double)
            };
            let best = with(Isa::best());
            #[cfg(target_arch = "x86_64")]
            if Isa::best() == Isa::Avx512 {
                assert!(with(Isa::Avx2) == best, "{m} {k} {n}: bits");
            }
            let (single, double) = with(Isa::Plain);
            assert!(single.iter().zip(&best.0).all(|(a, b)| (a - b).abs() < 1e-4));
            assert!(double.iter().zip(&best.1).all(|(a, b)| (a - b).abs() < 1e-11));
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
            assert!(side < 50 || got[side - 1] == 0.0, "the far corner is left out");
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
