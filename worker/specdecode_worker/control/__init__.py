"""What a worker decides by itself between two plans: shapes, exploration and the guard. No torch."""
