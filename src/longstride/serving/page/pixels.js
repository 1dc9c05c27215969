// Images as bytes: rows of pixels, channels together; drawn on canvases, and made from files.

import { element } from "./dom.js";

export class Format {
  constructor([height, width, channels]) {
    Object.assign(this, { height, width, channels });
    this.size = height * width * channels;
    this.row = width * channels;
  }

  canvas(properties = {}) {
    return element("canvas", { width: this.width, height: this.height, ...properties });
  }

  // Draws the bytes that are there; the rest stays clear. colour(pixel): [red, green, blue] instead, from 0 to 255.
  draw(canvas, bytes, colour) {
    const paint = canvas.getContext("2d");
    const image = paint.createImageData(this.width, this.height);
    const known = Math.ceil(bytes.length / this.channels);
    for (let pixel = 0; pixel < known; pixel += 1) {
      const [red, green, blue] = colour ? colour(pixel) : this.pixel(bytes, pixel);
      image.data.set([red, green, blue, 255], 4 * pixel);
    }
    paint.putImageData(image, 0, 0);
  }

  pixel(bytes, pixel) {
    const start = pixel * this.channels;
    const red = bytes[start];
    return this.channels < 3 ? [red, red, red] : [red, bytes[start + 1] ?? 0, bytes[start + 2] ?? 0];
  }

  // Sums a value of each byte over the channels of each pixel.
  perPixel(values) {
    const sums = new Float32Array(this.height * this.width);
    values.forEach((value, place) => { sums[Math.floor(place / this.channels)] += value ?? 0; });
    return sums;
  }

  // A picture, cut to the format's shape around its middle and scaled, as bytes.
  fromPicture(picture, width, height) {
    const scale = Math.min(width / this.width, height / this.height);
    const [wide, tall] = [this.width * scale, this.height * scale];
    const canvas = this.canvas();
    const paint = canvas.getContext("2d", { willReadFrequently: true });
    paint.imageSmoothingQuality = "high";
    paint.fillStyle = "white"; // Behind what is transparent.
    paint.fillRect(0, 0, this.width, this.height);
    paint.drawImage(picture, (width - wide) / 2, (height - tall) / 2, wide, tall, 0, 0, this.width, this.height);
    return this.fromRgba(paint.getImageData(0, 0, this.width, this.height).data);
  }

  fromRgba(data) {
    const bytes = new Uint8Array(this.size);
    for (let pixel = 0; pixel < this.height * this.width; pixel += 1) {
      const colours = data.subarray(4 * pixel, 4 * pixel + 4);
      if (this.channels < 3) {
        bytes[pixel * this.channels] = Math.round(0.299 * colours[0] + 0.587 * colours[1] + 0.114 * colours[2]);
        if (this.channels === 2) bytes[pixel * 2 + 1] = 255;
      } else {
        bytes.set(colours.subarray(0, this.channels), pixel * this.channels);
      }
    }
    return bytes;
  }

  // A bundled sample, which may have another format.
  fromSample(sample) {
    const other = new Format(sample.item);
    const bytes = Uint8Array.from(sample.bytes);
    if (other.height === this.height && other.width === this.width && other.channels === this.channels) return bytes;
    const canvas = other.canvas();
    other.draw(canvas, bytes);
    return this.fromPicture(canvas, other.width, other.height);
  }

  async fromFile(file) {
    let picture;
    try {
      picture = await createImageBitmap(file);
    } catch {
      throw new Error(`${file.name} is no picture that this browser can read.`);
    }
    try {
      return this.fromPicture(picture, picture.width, picture.height);
    } finally {
      picture.close();
    }
  }
}
