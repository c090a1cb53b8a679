"""Images of rows: decoding within limits, their places in messages, and what a processor makes of them."""
