//! Matrix products, by the `matrixmultiply` crate: the one place of this crate with unsafe code.
#![allow(unsafe_code)]

/// A matrix in someone else's slice: element `(i, j)` lies at `i * row_stride + j * col_stride`.
#[derive(Debug, Clone, Copy)]
pub struct View<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, T> View<'a, T> {
    /// Row-major without gaps.
    pub fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// Rows `stride` elements apart.
    ///
    /// # Panics
    /// If the matrix does not fit the slice.
    pub fn strided(data: &'a [T], rows: usize, cols: usize, stride: usize) -> Self {
        assert_fits(data.len(), rows, cols, stride);
        Self { data, rows, cols, row_stride: stride, col_stride: 1 }
    }

    /// The transpose; nothing is copied.
    pub fn t(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }
}

/// A matrix to be written, row-major, in someone else's slice.
#[derive(Debug)]
pub struct ViewMut<'a, T> {
    data: &'a mut [T],
    rows: usize,
    cols: usize,
    stride: usize,
}

impl<'a, T> ViewMut<'a, T> {
    /// Row-major without gaps.
    pub fn new(data: &'a mut [T], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// Rows `stride` elements apart.
    ///
    /// # Panics
    /// If the matrix does not fit the slice, or its rows overlap.
    pub fn strided(data: &'a mut [T], rows: usize, cols: usize, stride: usize) -> Self {
        assert_fits(data.len(), rows, cols, stride);
        assert!(stride >= cols, "rows of {cols} overlap at stride {stride}");
        Self { data, rows, cols, stride }
    }
}

/// Every element of a `rows` x `cols` matrix lies below `len`, and every offset fits an `isize`.
fn assert_fits(len: usize, rows: usize, cols: usize, stride: usize) {
    if rows == 0 || cols == 0 {
        return;
    }
    let last = (rows - 1).checked_mul(stride).and_then(|start| start.checked_add(cols - 1));
    assert!(
        last.is_some_and(|last| last < len) && isize::try_from(stride).is_ok(),
        "a matrix of {rows} x {cols}, stride {stride}, in a slice of {len}"
    );
}

/// A type with a matrix product.
pub trait Gemm: Copy {
    /// `c = alpha * a * b + beta * c`. With `beta` 0 the old `c` is not read.
    ///
    /// # Panics
    /// If the shapes do not match.
    fn gemm(alpha: Self, a: View<'_, Self>, b: View<'_, Self>, beta: Self, c: ViewMut<'_, Self>);
}

macro_rules! gemm {
    ($float:ident, $kernel:path) => {
        impl Gemm for $float {
            fn gemm(alpha: Self, a: View<'_, Self>, b: View<'_, Self>, beta: Self, c: ViewMut<'_, Self>) {
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
                // SAFETY: the views were checked when made: every element of the three matrices lies in its slice and
                // every stride fits an isize (column strides are strides or 1). `c` is borrowed exclusively, so it overlaps
                // neither input, and its rows do not overlap each other. The kernel keeps no pointer after it returns.
                unsafe {
                    $kernel(
                        c.rows,
                        a.cols,
                        c.cols,
                        alpha,
                        a.data.as_ptr(),
                        a.row_stride as isize,
                        a.col_stride as isize,
                        b.data.as_ptr(),
                        b.row_stride as isize,
                        b.col_stride as isize,
                        beta,
                        c.data.as_mut_ptr(),
                        c.stride as isize,
                        1,
                    );
                }
            }
        }
    };
}

gemm!(f32, matrixmultiply::sgemm);
gemm!(f64, matrixmultiply::dgemm);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_match_the_definition() {
        let (m, k, n) = (5, 3, 7);
        let a: Vec<f64> = (0..m * k).map(|i| (i as f64).sin()).collect();
        let b: Vec<f64> = (0..n * k).map(|i| (i as f64).cos()).collect();
        let mut c = vec![1.0; m * (n + 2)];
        f64::gemm(
            2.0,
            View::new(&a, m, k),
            View::new(&b, n, k).t(),
            0.5,
            ViewMut::strided(&mut c, m, n, n + 2),
        );
        for i in 0..m {
            for j in 0..n {
                let sum: f64 = (0..k).map(|l| a[i * k + l] * b[j * k + l]).sum();
                assert!((c[i * (n + 2) + j] - (2.0 * sum + 0.5)).abs() < 1e-12);
            }
            assert_eq!(c[i * (n + 2) + n..(i + 1) * (n + 2)], [1.0, 1.0]);
        }
    }

    #[test]
    fn an_empty_sum_is_zero() {
        let mut c = vec![f32::NAN; 4];
        f32::gemm(1.0, View::new(&[], 2, 0), View::new(&[], 0, 2), 0.0, ViewMut::new(&mut c, 2, 2));
        assert_eq!(c, [0.0; 4]);
        f32::gemm(1.0, View::new(&[], 0, 3), View::new(&[0.0; 6], 3, 2), 0.0, ViewMut::new(&mut [], 0, 2));
    }

    #[test]
    #[should_panic(expected = "in a slice of 5")]
    fn a_short_slice_is_refused() {
        View::new(&[0.0; 5], 2, 3);
    }
}
