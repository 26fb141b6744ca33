"""Hand-written commonsense completions -> evalsets/tasks/commonsense.jsonl.

Every item was written one by one; the script only shuffles the choices with a
fixed seed (so that the right answer's position is balanced) and writes JSONL.
Item: (slice, context, right choice, wrong choice, ...).
Run from the parent of evalsets: python evalsets/generators/commonsense.py
"""

import json
import random
from pathlib import Path

SEED = 20417
OUT = Path(__file__).resolve().parent.parent / "tasks" / "commonsense.jsonl"

ITEMS = [
    # ------------------------------------------------------------ physics
    ("physics", "Dana let go of the helium balloon in the park, and it", "floated up over the trees", "sank down into the grass", "stayed still beside her hand", "rolled away along the path"),
    ("physics", "He left the ice cream tub on the sunny windowsill all afternoon. By evening it", "had turned into a sweet puddle", "had frozen even harder than before", "had grown to twice its size", "had baked into a crisp biscuit"),
    ("physics", "The marble rolled off the edge of the table and", "dropped to the floor", "climbed up the wall", "hung in the air", "rolled back onto the plate"),
    ("physics", "Wet sheets pegged on the line on a hot, windy day will", "dry within an hour or two", "stay soaked for a whole week", "become heavier as time passes", "freeze stiff before lunchtime"),
    ("physics", "A wooden spoon was dropped into the full sink. The spoon", "floated on the surface", "melted in the water", "sank and broke in two", "jumped out of the sink"),
    ("physics", "Tom threw a pebble into the pond, and the pebble", "sank straight to the bottom", "floated across to the ducks", "dissolved like a sugar cube", "bounced back into his hand"),
    ("physics", "She held the book in front of the lamp, and on the wall behind it appeared", "a dark shape of the book", "a bright picture of the lamp", "a printed copy of the page", "a hole the size of the book"),
    ("physics", "When you push a loaded shopping trolley, compared with an empty one it is", "harder to get moving", "easier to get moving", "lighter in your hands", "quicker to stop"),
    ("physics", "The metal handle of the pan had been over the flame, so when Ravi grabbed it he", "burned his hand", "felt a cold chill", "fell fast asleep", "smelled a flower"),
    ("physics", "The bath was filled right to the brim. When he climbed in, the water", "spilled over the sides", "disappeared down his ears", "became as hard as stone", "shrank to half its depth"),
    ("physics", "If you leave a glass bottle full of water in the freezer overnight, the bottle may", "crack as the ice swells", "shine as the water glows", "shrink as the water boils", "soften as the ice melts"),
    ("physics", "The kite fell out of the sky as soon as", "the wind died down", "the wind picked up", "the string was held", "the sky was clear"),
    ("physics", "The torch gave only a dim light because its batteries", "were almost empty", "were brand new", "were fully charged", "were very bright"),
    ("physics", "A magnet was held over a bowl of paper clips and plastic buttons. It picked up", "only the paper clips", "only the plastic buttons", "the bowl and the table", "nothing but the air"),
    ("physics", "From far away the mountain looked tiny, but as the bus came closer it", "seemed bigger and bigger", "seemed smaller and smaller", "moved behind the bus", "turned into a lake"),
    ("physics", "He shouted into the empty cave, and a moment later he", "heard his own voice again", "saw his own face again", "smelled his own lunch again", "felt his own pockets again"),
    ("physics", "The sled went fastest when the hill was", "steep and icy", "flat and muddy", "covered in gravel", "going upwards"),
    ("physics", "She put a lid on the pot so that the steam would", "stay inside the pot", "blow out the candle", "turn into flour", "wash the window"),
    ("physics", "The sandcastle stood near the water's edge. When the tide came in, the castle", "was washed away", "was painted blue", "grew a new tower", "caught on fire"),
    ("physics", "Rubbing your hands together quickly on a cold day makes them", "feel warmer", "feel colder", "turn green", "grow longer"),
    ("physics", "The bicycle tyre had a nail in it, so the air", "leaked out slowly", "became sticky glue", "filled it tighter", "turned into water"),

    # ------------------------------------------------------------ social
    ("social", "Mina's friend had just lost her dog, so Mina", "gave her a long hug", "laughed at her loudly", "asked her for money", "told her to throw a party"),
    ("social", "When his neighbour carried in his parcels during the storm, Luis", "thanked her warmly", "shouted at her angrily", "sent her a bill", "called the police"),
    ("social", "The little boy broke the vase and felt guilty, so he", "told his mother he was sorry", "asked his mother for a prize", "told everyone that he was tall", "broke another one to celebrate"),
    ("social", "The old woman on the bus had nowhere to sit, so the teenager", "stood up and offered his seat", "put his bag on the floor to sleep", "spread his legs across the row", "told her that she looked tired"),
    ("social", "Everyone in the library was reading quietly. When Nadia's phone rang, she", "switched it off at once", "turned the volume up", "began to sing along", "passed it round the room"),
    ("social", "It was her first day at the new school and she knew nobody, so she felt", "a bit nervous and shy", "very bored of her friends", "sure that she was the oldest", "sleepy from knowing them all"),
    ("social", "Paul had promised to help Ana move house, but he forgot. The next day he", "called her to apologise", "asked her for a reward", "told her she was welcome", "sent her a bill for it"),
    ("social", "The comedian told a really good joke, and the audience", "burst out laughing", "began to weep", "fell asleep", "left to find a dentist"),
    ("social", "After losing the final match, the players walked off the pitch looking", "sad and tired", "proud and joyful", "clean and rested", "bored and hungry"),
    ("social", "Our guests arrived hungry after the long drive, so we", "served them a hot dinner", "hid the food in the cellar", "sent them for a long run", "showed them how to drive"),
    ("social", "She wanted the surprise party to stay secret, so she told the guests", "not to mention it to Ben", "to ask Ben for the address", "to post the plan on his door", "to call Ben every evening"),
    ("social", "The waiter brought the wrong dish, so the customer politely", "asked for the one he had ordered", "ate the menu and the napkin", "threw his chair at the window", "thanked him for the new shoes"),
    ("social", "The baby had been awake all night crying, so in the morning her parents were", "worn out", "well rested", "wide awake", "full of energy"),
    ("social", "Two children both wanted the last slice of cake, so their father", "cut it into two equal pieces", "put it on top of the roof", "taught them both to swim", "gave each of them a broom"),
    ("social", "When she heard that she had won the scholarship, Leila", "jumped up and cheered", "slammed the door in anger", "hid under the bed in fear", "yawned and went to sleep"),
    ("social", "He was late for the meeting, so when he came in he", "said sorry and sat down quietly", "asked why they were all so early", "told them all to leave the room", "took a nap in front of the boss"),
    ("social", "My sister does not like being teased about her singing, so I try to", "be kind when she sings", "laugh when she sings", "copy her in a silly voice", "tease her even more often"),
    ("social", "At the funeral people spoke in", "low, gentle voices", "loud, happy shouts", "the voices of clowns", "funny made-up words"),
    ("social", "The shy girl finally raised her hand to answer, and the teacher", "smiled and listened to her", "locked her in the cupboard", "gave her back her umbrella", "ate the chalk in surprise"),
    ("social", "He noticed that the stranger ahead had dropped her wallet, so he", "picked it up and ran after her", "kicked it under a parked car", "took the money out and walked off", "pointed at it and kept laughing"),
    ("social", "Grandma was hard of hearing, so when they talked to her they", "spoke loud and clear", "whispered very softly", "covered their mouths", "turned off the lights"),

    # ------------------------------------------------------------ tools
    ("tools", "To hang the picture, he drove a nail into the wall with", "a hammer", "a sponge", "a spoon", "a pillow"),
    ("tools", "She needed to cut the wrapping paper, so she took out", "a pair of scissors", "a bar of soap", "a roll of tape", "a wooden ruler"),
    ("tools", "The screw was loose, so Farid tightened it with", "a screwdriver", "a paintbrush", "a feather", "a tea towel"),
    ("tools", "The leaves covered the whole lawn, so they gathered them with", "a rake", "a fork and knife", "a hairbrush", "a saw"),
    ("tools", "To see the tiny writing on the coin, the collector used", "a magnifying glass", "a pair of gloves", "a watering can", "a measuring tape"),
    ("tools", "He wanted to know how wide the window was, so he fetched", "a tape measure", "a kitchen scale", "a thermometer", "an alarm clock"),
    ("tools", "The soup was ready, and she spooned it into bowls with", "a ladle", "a rake", "a comb", "a fork"),
    ("tools", "The tent would not stay up in the wind until they hammered in", "the pegs", "the pillows", "the lanterns", "the blankets"),
    ("tools", "The hole for the new tree had to be deep, so the gardener dug it with", "a spade", "a ladder", "a broom", "a hose"),
    ("tools", "The light bulb was too high to reach, so she climbed", "a ladder", "a carpet", "a curtain", "a bookmark"),
    ("tools", "There was broken glass on the kitchen floor, so he swept it up with", "a dustpan and brush", "his bare hands", "a wet paper bag", "a loaf of bread"),
    ("tools", "The camper wanted to find north in the thick forest, so she looked at her", "compass", "notebook", "lunch box", "rain boots"),
    ("tools", "To turn the dough into a thin sheet, the baker used", "a rolling pin", "a cheese grater", "a pair of tongs", "a paper cup"),
    ("tools", "He had a fever, so the nurse checked him with", "a thermometer", "a ruler", "a telescope", "a calculator"),
    ("tools", "Thick wire is easiest to cut with", "a pair of pliers", "a butter knife", "a sheet of paper", "a piece of string"),
    ("tools", "The loose button was sewn back on with", "a needle and thread", "a hammer and nails", "a knife and fork", "a bucket and mop"),
    ("tools", "She drained the boiled pasta by pouring it into", "a colander", "an envelope", "a vase", "a shoe"),
    ("tools", "The plank was too long for the shelf, so the carpenter shortened it with", "a saw", "a drill", "a brush", "a glue stick"),
    ("tools", "Because the parcel kept coming open, Mr Bell sealed it with", "strong tape", "warm milk", "a wet sponge", "a pencil"),
    ("tools", "Water dripped from the ceiling all night, so they placed on the floor", "a bucket", "a fan", "a pillow", "a candle"),

    # ------------------------------------------------------------ causes
    ("causes", "The car would not start this morning because", "its battery was flat", "its paint was red", "its seats were soft", "its tank was full"),
    ("causes", "The plants on the balcony had wilted because nobody", "had watered them for weeks", "had sung to them in June", "had bought them new shoes", "had painted the front door"),
    ("causes", "The toast was black and smoky because it", "had been in the toaster too long", "had been left in the cold fridge", "had never been near any heat", "had been spread with jam"),
    ("causes", "Her shoes were covered in mud because she", "had walked across a wet field", "had stayed in bed all day", "had read a book about ships", "had kept them in the box"),
    ("causes", "The whole street went dark because", "the power had failed", "the lamps were switched on", "the sun had come up", "the shops had opened"),
    ("causes", "Omar had stomach ache after the party because he", "ate far too many sweets", "wore a very nice jacket", "danced with his cousin", "came home by bus"),
    ("causes", "The milk smelled sour because it", "was two weeks old", "was fresh that day", "came in a carton", "was white"),
    ("causes", "The dog was barking at the door because", "someone had rung the bell", "the house was silent", "it was fast asleep", "the carpet was brown"),
    ("causes", "The road was closed because", "a tree had fallen across it", "the cars on it were clean", "the sky above it was blue", "a map of it had been drawn"),
    ("causes", "He could not read the sign because he", "had left his glasses at home", "had eaten a big breakfast", "had very good eyesight", "had put on clean socks"),
    ("causes", "The cake did not rise because she forgot to add", "the baking powder", "the birthday candles", "the paper napkins", "the glass of water to drink"),
    ("causes", "The window was broken because", "a ball had hit it", "a curtain hung by it", "a cat looked through it", "a light shone on it"),
    ("causes", "They missed the train because", "their taxi was stuck in traffic", "they got to the station early", "the train had many windows", "they had bought their tickets"),
    ("causes", "His voice was hoarse on Monday because on Sunday he", "had shouted all through the match", "had slept quietly on the sofa", "had written a letter to his aunt", "had worn a blue scarf"),
    ("causes", "The river flooded the fields after", "a week of heavy rain", "a week of dry sunshine", "the sale of a cow", "the end of the film"),
    ("causes", "The wool jumper came out of the wash two sizes smaller because", "the water had been too hot", "the sheep had been too small", "the soap had been too white", "the basket had been too big"),
    ("causes", "The phone screen cracked when", "it fell on the stone steps", "it was put on the soft bed", "it was charged at night", "she saved a new number"),
    ("causes", "The bread was gone in the morning, and crumbs led to the hole where", "the mouse lived", "the whale lived", "the teacher lived", "the moon lived"),
    ("causes", "The clock on the wall stopped because nobody had", "changed its battery", "asked it the time", "looked at the wall", "been late for work"),
    ("causes", "Her hair was dripping wet because she had just", "come out of the shower", "come out of the oven", "brushed her teeth", "put on her boots"),

    # ------------------------------------------------------------ cooking
    ("cooking", "Before frying the onions, heat some", "oil in the pan", "milk in the fridge", "soap in the sink", "sand in the bowl"),
    ("cooking", "To make the tea less bitter, she stirred in", "a spoonful of sugar", "a spoonful of salt", "a slice of onion", "a drop of vinegar"),
    ("cooking", "Boil the eggs for ten minutes, then peel off the", "shells", "feathers", "labels", "leaves"),
    ("cooking", "The pizza was too hot to eat, so they", "let it cool for a few minutes", "put it back into the hot oven", "poured boiling water on top", "ate it as fast as they could"),
    ("cooking", "For the fruit salad, wash the grapes and", "slice the bananas", "grate the soap", "boil the ice cubes", "fry the napkins"),
    ("cooking", "The soup tasted bland, so the cook added", "a pinch of salt", "a cup of gravel", "more plain water", "an empty plate"),
    ("cooking", "To keep the fish fresh until dinner, put it in", "the fridge", "the sunshine", "the laundry basket", "the bookcase"),
    ("cooking", "Sift the flour, crack two eggs into it and", "whisk until the batter is smooth", "wait until the eggs hatch", "iron the batter until it is flat", "hang the batter up to dry"),
    ("cooking", "Once the rice has soaked up all the water, it is", "soft and ready to eat", "hard and still raw", "as cold as snow", "ready to be planted"),
    ("cooking", "She greased the baking tin so that the cake would", "come out easily", "stick to the sides", "taste of metal", "stay raw inside"),
    ("cooking", "He left the frying pan on high heat and went out. When he came back, the kitchen was", "full of smoke", "full of snow", "cold and frosty", "neat and tidy"),
    ("cooking", "The avocado was still rock hard, so Pia decided to", "wait a few days before eating it", "drink it through a paper straw", "pour it over her breakfast cereal", "spread it thinly on her toast now"),
    ("cooking", "To bake bread you need flour, water, salt and", "yeast", "gravel", "ink", "shampoo"),
    ("cooking", "The lemonade was too sour, so the children", "added more sugar", "added more lemon", "took out the water", "warmed up the jug"),
    ("cooking", "When the kettle whistles, it means that the water", "is boiling", "is frozen", "is missing", "is dirty"),
    ("cooking", "He chopped the chillies and then rubbed his eyes, which made them", "sting badly", "change colour", "feel much better", "smell of roses"),
    ("cooking", "Put the leftovers in a box with a lid and", "keep them in the fridge", "bury them in the garden", "leave them out for a month", "post them to the bank"),
    ("cooking", "A smoothie is made by putting fruit and yoghurt in", "a blender", "a toaster", "a dishwasher", "a teapot"),
    ("cooking", "Peel the potatoes, boil them until soft, then", "mash them with butter", "wash them with shampoo", "plant them in the pan", "sew them into a bag"),
    ("cooking", "The chicken was still pink in the middle, so she", "put it back in the oven", "served it to the guests", "put it straight on the plates", "fed it to the baby"),

    # ------------------------------------------------------------ weather
    ("weather", "Dark clouds were gathering and thunder rumbled, so the hikers", "hurried to find shelter", "lay down to sunbathe", "climbed the tallest tree", "put on their sunglasses"),
    ("weather", "It had snowed all night, so in the morning Dad", "shovelled the path to the gate", "mowed the grass on the lawn", "filled the paddling pool", "watered the roses"),
    ("weather", "It was the hottest day of the year, and everyone at the beach", "looked for some shade", "wore thick wool coats", "built a big snowman", "lit a fire to keep warm"),
    ("weather", "The fog was so thick that the drivers", "slowed down and used their lights", "closed their eyes and sped up", "got out to pick strawberries", "could see for many miles ahead"),
    ("weather", "A strong gust of wind blew across the square and", "carried off his hat", "froze the fountain", "boiled the puddles", "painted the benches"),
    ("weather", "The forecast said rain, so before leaving she packed", "an umbrella", "a sun hat", "a pair of skis", "a beach towel"),
    ("weather", "After the storm passed and the sun came out, across the sky they saw", "a rainbow", "a flood of stars", "a row of houses", "an eclipse of rain"),
    ("weather", "The pavement was covered with ice, so people", "walked with small careful steps", "ran as quickly as they could", "took off their shoes and socks", "swam across to the other side"),
    ("weather", "It had not rained for three months, and the fields", "were brown and dry", "were deep under water", "were green and lush", "were white with snow"),
    ("weather", "The morning was frosty, and he had to scrape the ice from", "the windscreen of his car", "the inside of his toaster", "the top of his soup bowl", "the pages of his newspaper"),
    ("weather", "We cancelled the picnic because", "it was pouring with rain", "the sky was clear and blue", "the food was delicious", "it was a lovely warm day"),
    ("weather", "During the heatwave the old people were told to", "drink plenty of water", "wear two extra jumpers", "stand all day in the sun", "keep their heaters on"),
    ("weather", "When lightning flashes nearby, a moment later you hear", "thunder", "silence", "music", "birdsong"),
    ("weather", "The sea was rough and the waves were huge, so the fishermen", "stayed in the harbour", "went out for a swim", "rowed far from the land", "felt calm in their tiny boat"),
    ("weather", "In autumn the leaves of the oak in our garden", "turn brown and fall", "turn into acorn soup", "climb back on the twigs", "swim down the river to spawn"),
    ("weather", "The snowman began to shrink when", "the weather turned warm", "the night became colder", "more snow fell on it", "the children went to bed"),
    ("weather", "The sun was low and shone straight into her eyes, so the driver", "pulled down the visor", "turned on the heater", "opened the boot", "put up her umbrella"),
    ("weather", "The tent was soaked after the rainy night, so they", "hung it out to dry", "poured water on it", "rolled it up in snow", "put it in the lake"),
    ("weather", "The first warm days of spring came, and in the garden the tulips", "began to bloom", "began to freeze", "turned to stone", "flew south"),

    # ------------------------------------------------------------ safety
    ("safety", "Before crossing the road, you should", "look both ways", "close both eyes", "tie your laces together", "turn your back on the cars"),
    ("safety", "The smoke alarm went off in the middle of the night, so the family", "got out of the house", "went back to sleep", "lit some more candles", "hid in the wardrobe"),
    ("safety", "Before changing the light bulb, the electrician", "switched off the power", "filled the lamp with water", "licked the bare wires", "turned off her phone"),
    ("safety", "Cleaning chemicals should be kept", "out of reach of children", "next to the baby's bottle", "in an old lemonade bottle", "open on the kitchen table"),
    ("safety", "On a motorbike you should always wear", "a helmet", "a blindfold", "a necktie", "slippers"),
    ("safety", "She cut her finger while slicing bread, so she", "put a plaster on it", "put some jam on it", "kept on cutting it", "washed the ceiling"),
    ("safety", "The sign by the lake said the ice was thin, so the skaters", "stayed on the shore", "jumped up and down on it", "drove a truck across it", "lit a fire in the middle"),
    ("safety", "When the driver got in, the first thing she did was", "fasten her seat belt", "close her eyes", "let go of the wheel", "climb on the roof"),
    ("safety", "The chemist was pouring acid, so she wore", "gloves and goggles", "shorts and sandals", "a swimsuit", "a paper crown"),
    ("safety", "The hot iron was still plugged in, so Mum told the toddler", "not to touch it", "to sit on it", "to hug it tightly", "to lick it clean"),
    ("safety", "He spilled water on the tiled floor and wiped it up at once so that nobody would", "slip and fall", "get thirsty", "go for a swim", "feel lonely"),
    ("safety", "A stranger rang and asked for her bank password, so she", "hung up the phone", "told him the password", "spelled it out for him", "asked him to write it down"),
    ("safety", "The campers made sure that, before they left the forest, their fire was", "completely out", "burning brightly", "stacked with dry logs", "near the dry grass"),
    ("safety", "The bottle had a skull on its label, which means that the liquid is", "poisonous", "tasty", "healthy", "very cheap"),
    ("safety", "Riding home after dark, the cyclist switched on", "his front and back lights", "his radio and kettle", "his desk lamp", "his washing machine"),
    ("safety", "The child could not swim, so at the pool he", "wore armbands and stayed near Mum", "dived alone into the deep end", "pushed his mother away and ran", "carried heavy stones in his pockets"),
    ("safety", "Someone in the café was choking and could not breathe, so the waitress", "called for help straight away", "brought him the bill to pay", "asked him to sing a song", "turned the music up"),
    ("safety", "The ladder wobbled on the soft ground, so he asked his brother to", "hold it steady", "shake it hard", "saw it in half", "take it away under him"),
    ("safety", "At the top of the steep hill she tested her bike's", "brakes", "bell sticker", "colour", "basket flowers"),

    # ------------------------------------------------------------ animals
    ("animals", "The cat saw a bird on the lawn, crouched low and", "crept towards it", "barked at it", "built a nest", "flew after it"),
    ("animals", "When the farmer rattled the bucket of grain, the hens", "came running to eat", "swam away in fear", "began to neigh", "climbed into the car"),
    ("animals", "The puppy had chewed up one of his slippers, so now Mr Ito", "has only one slipper left", "has three slippers left", "has a puppy with shoes", "has two fine slippers"),
    ("animals", "The spider sat in its web and waited for", "a fly to get caught", "a bus to come by", "a letter from home", "a cow to get caught"),
    ("animals", "The horse was thirsty after the ride, so it", "drank from the trough", "ate a bag of salt", "lay down by the fire", "put on its saddle"),
    ("animals", "As winter came near, the squirrel", "hid nuts in the ground", "bought a warm jacket", "flew to the south", "laid an egg in a nest"),
    ("animals", "The dog heard the word 'walk' and ran to fetch", "its lead", "its homework", "its car keys", "its glasses"),
    ("animals", "The mother duck walked to the pond, and behind her in a row", "came her ducklings", "came her kittens", "came her teachers", "came her puppies"),
    ("animals", "The fish was lying on the deck, gasping, so the boy", "threw it back in the water", "gave it a warm blanket", "took it for a walk on a lead", "taught it to climb a tree"),
    ("animals", "When the bees felt that their hive was in danger, they", "stung the intruder", "sang him a lullaby", "baked him a cake", "lent him some money"),
    ("animals", "Frightened by the fireworks, our cat", "hid under the bed", "clapped its paws", "asked for more", "lit a rocket"),
    ("animals", "The snail felt a finger touch it and", "pulled back into its shell", "galloped off across the field", "growled and showed its teeth", "spread its wings and flew off"),
    ("animals", "The cow had just been milked, and the farmer carried away", "a full bucket of milk", "a basket of eggs", "a sack of wool", "a jar of honey"),
    ("animals", "The old parrot surprised the visitor by", "saying good morning", "writing a novel", "driving the bus home", "playing in a football team"),

    # ------------------------------------------------------------ routines
    ("routines", "She was very tired after the night shift, so when she got home she", "went straight to bed", "went out to run a race", "set off for the office", "painted the whole house"),
    ("routines", "He finished the last page of the novel and", "put it back on the shelf", "put it into the washing machine", "planted it in a flower pot", "ate it with a little sauce"),
    ("routines", "The alarm rang at six, and Katya", "got up and washed her face", "put on pyjamas to go to work", "had her dinner and said goodnight", "wished them all a good evening"),
    ("routines", "Since the fridge was empty, they went to", "the supermarket", "the swimming pool", "the hairdresser", "the museum"),
    ("routines", "His hair had grown over his eyes, so he made an appointment with", "the barber", "the plumber", "the baker", "the vet"),
    ("routines", "Her tooth had been aching for days, so she went to see", "a dentist", "a pilot", "a florist", "a postman"),
    ("routines", "The kitchen tap was leaking badly, so they called", "a plumber", "a dentist", "a singer", "a lawyer"),
    ("routines", "She wrote the address on the envelope, stuck on a stamp and", "dropped it in the post box", "flushed it down the drain", "cooked it in the oven", "hung it on the washing line"),
    ("routines", "He put the dirty clothes in the machine, added soap and", "pressed the start button", "took out a loan", "waited for the toast", "climbed in after them"),
    ("routines", "When the film ended and the lights came on, the audience", "got up and left the hall", "bought tickets for the start", "sat down and waited for the ads", "asked when the film would begin"),
    ("routines", "The bin was full and starting to smell, so he", "took the rubbish outside", "put it on the dinner table", "sprayed it with gravy", "put it in the wardrobe"),
    ("routines", "They wanted to see the city from above, so they", "went up the tower", "went down to the cellar", "took the underground", "closed the curtains"),
    ("routines", "Before going to the desert, the explorers filled their bottles with", "water", "sand", "stones", "smoke"),
    ("routines", "Her library book was due back today, so she", "returned it this morning", "bought a new bookcase", "tore out all the pages", "threw it in the river"),
    ("routines", "He wanted to learn the piano, so every day he", "practised for half an hour", "polished his new trumpet", "closed the lid and went out", "sold it and bought a boat"),
    ("routines", "It was too dark to read, so she", "turned on the lamp", "closed the curtains", "put out the candle", "took off her glasses"),
    ("routines", "The shop closes at five and it was already six, so when they arrived the door", "was locked", "was wide open", "was being opened", "was full of customers"),
    ("routines", "The suitcase was too heavy for the plane, so he", "took some things out of it", "put more books into it", "filled it up with water", "tied a brick to the handle"),
    ("routines", "It was his turn to do the dishes, so after dinner he", "filled the sink with warm water", "filled the sink with dry leaves", "put clean plates in the bin", "went to the shop for a stamp"),
]


def build():
    rng = random.Random(SEED)
    rows = []
    by_size = {}
    for i, item in enumerate(ITEMS):
        by_size.setdefault(len(item) - 2, []).append(i)
    position = {}
    for size, idx in by_size.items():
        slots = [k % size for k in range(len(idx))]
        rng.shuffle(slots)
        position.update(zip(idx, slots))
    for i, (label, context, right, *wrong) in enumerate(ITEMS):
        rng.shuffle(wrong)
        choices = list(wrong)
        choices.insert(position[i], right)
        row_id = f"commonsense-{i + 1:03d}"
        rows.append(
            {
                "id": row_id,
                "slice": label,
                "cluster": row_id,
                "context": context,
                "choices": choices,
                "answer": position[i],
            }
        )
    return rows


def main():
    rows = build()
    with OUT.open("w", encoding="utf-8", newline="\n") as f:
        for row in rows:
            f.write(json.dumps(row, ensure_ascii=False) + "\n")
    print(f"{OUT.name}: {len(rows)} rows")


if __name__ == "__main__":
    main()
